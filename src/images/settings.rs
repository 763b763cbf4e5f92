//! Settings, dependencies, and errors of the image manager.

use std::{io, path::PathBuf, sync::Arc};

use super::{
    credential_verification::VerificationPolicy,
    credentials::{DockerFolders, PluginConfigError, PluginFlags},
    gc::DiskSpaceOf,
    gc_rank::GcPolicy,
    puller::Parallelism,
};
use berth_cri::{CriError, ImageService, RuntimeService};
use berth_metrics::Registry;
use berth_ports::{Clock, EventSink, ObjectSource};
use berth_types::PodUid;

/// Settings of the image manager.
#[derive(Clone, Debug)]
pub struct ImagesConfig {
    /// The agent's root directory; records are in `image_manager` below it.
    pub root: PathBuf,
    /// `maxPods`: determines the capacity of the caches.
    pub max_pods: u32,
    /// `registryPullQPS`; 0 means no limit.
    pub registry_qps: u32,
    /// `registryBurst`.
    pub registry_burst: u32,
    /// `serializeImagePulls` and `maxParallelImagePulls`.
    pub parallelism: Parallelism,
    /// `imagePullCredentialsVerificationPolicy` with its allowlist; `None` if the gate
    /// `KubeletEnsureSecretPulledImages` is off: nothing is recorded or verified then.
    pub verification: Option<VerificationPolicy>,
    /// Gate `RuntimeClassInImageCriApi`.
    pub handler_in_calls: bool,
    /// Directories to search for the node's Docker configuration.
    pub docker: DockerFolders,
    /// Credential provider plugins; `None` without.
    pub plugins: Option<PluginFlags>,
    /// Policy of garbage collection.
    pub gc: GcPolicy,
}

/// Start or end of a pod's pull, for the startup latency.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PullMoment {
    /// The pull began.
    Began,
    /// The pull ended, successfully or not.
    Ended,
}

/// Callback for the start and end of pulls.
pub type OnPull = Arc<dyn Fn(&PodUid, PullMoment) + Send + Sync>;

/// Dependencies of the image manager.
pub struct ImagesDeps {
    /// CRI image service.
    pub images: Arc<dyn ImageService>,
    /// CRI runtime service: shows which images containers use.
    pub runtime: Arc<dyn RuntimeService>,
    /// Recorder of events.
    pub events: Arc<dyn EventSink>,
    /// Wall clock.
    pub clock: Arc<dyn Clock>,
    /// Registry of metrics.
    pub registry: Registry,
    /// Disk space of a filesystem; [`super::statvfs_disk_space`] in production.
    pub room: DiskSpaceOf,
    /// Callback for the start and end of pulls.
    pub on_pull: OnPull,
    /// Source of service accounts and tokens for credential plugins; `None` without an API server.
    pub accounts: Option<Arc<dyn ObjectSource>>,
}

/// Why the image manager cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum ImagesError {
    /// The directories of pull records cannot be created or read.
    #[error("failed to open image pull records in {}: {source}", root.display())]
    Records {
        /// The agent's root directory.
        root: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The configuration of credential plugins is invalid.
    #[error("failed to register CRI image credential providers: {0}")]
    Plugins(#[from] PluginConfigError),
    /// The images cannot be listed, so interrupted pulls cannot be recovered.
    #[error("failed to list images: {0}")]
    List(CriError),
}
