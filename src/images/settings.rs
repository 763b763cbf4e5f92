//! What the images room is opened with, and why it may not open.

use std::{io, path::PathBuf, sync::Arc};

use super::{
    credentials::{DockerFolders, PluginConfigError, PluginFlags},
    gc::RoomOf,
    gc_rank::GcPolicy,
    puller::Parallelism,
    verify::VerificationPolicy,
};
use berth_cri::{CriError, ImageService, RuntimeService};
use berth_metrics::Registry;
use berth_ports::{Clock, EventSink, ObjectSource};
use berth_types::PodUid;

/// Settings of the images room.
#[derive(Clone, Debug)]
pub struct ImagesConfig {
    /// The agent's root directory; records live in `image_manager` below it.
    pub root: PathBuf,
    /// `maxPods`: sizes the caches.
    pub max_pods: u32,
    /// `registryPullQPS`; 0 is no limit.
    pub registry_qps: u32,
    /// `registryBurst`.
    pub registry_burst: u32,
    /// `serializeImagePulls` and `maxParallelImagePulls`.
    pub parallelism: Parallelism,
    /// `imagePullCredentialsVerificationPolicy` with its allowlist; `None` with the gate
    /// `KubeletEnsureSecretPulledImages` off: nothing is recorded or verified then.
    pub verification: Option<VerificationPolicy>,
    /// Gate `RuntimeClassInImageCriApi`.
    pub handler_in_calls: bool,
    /// Where the node's docker configuration is looked for.
    pub docker: DockerFolders,
    /// Exec plugins; `None` without.
    pub plugins: Option<PluginFlags>,
    /// Garbage collection.
    pub gc: GcPolicy,
}

/// When a pod's pull began and ended, for the start-up latency.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PullMoment {
    /// Began.
    Began,
    /// Ended, well or not.
    Ended,
}

/// Whom to tell of pulls.
pub type OnPull = Arc<dyn Fn(&PodUid, PullMoment) + Send + Sync>;

/// What the images room needs of others.
pub struct ImagesDeps {
    /// The image service.
    pub images: Arc<dyn ImageService>,
    /// The runtime service: which images containers use.
    pub runtime: Arc<dyn RuntimeService>,
    /// Where events go.
    pub events: Arc<dyn EventSink>,
    /// Wall time.
    pub clock: Arc<dyn Clock>,
    /// Where metrics are registered.
    pub registry: Registry,
    /// Room on a filesystem; [`super::statvfs_room`] in life.
    pub room: RoomOf,
    /// Told of every pull.
    pub on_pull: OnPull,
    /// Where service accounts and their tokens come from, for credential plugins; none without an API server.
    pub accounts: Option<Arc<dyn ObjectSource>>,
}

/// Why the images room cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum ImagesError {
    /// The folders of records cannot be made or read.
    #[error("failed to open image pull records in {}: {source}", root.display())]
    Records {
        /// The agent's root directory.
        root: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The configuration of credential plugins cannot be used.
    #[error("failed to register CRI image credential providers: {0}")]
    Plugins(#[from] PluginConfigError),
    /// The images cannot be listed, so that pulls that were cut short cannot be told.
    #[error("failed to list images: {0}")]
    List(CriError),
}
