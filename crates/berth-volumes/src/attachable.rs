//! Volume plugin trait: stage, publish, unpublish, unstage, and expand volumes of the node.
//!
//! For volumes that are more than files written by this agent: they are attachable, staged once for all pods of a node
//! and published to each, or hang when their server does.
//!
//! ```text
//!            attached ─► stage (once) ─► publish (each pod)
//!                        unstage      ◄─ unpublish
//! ```
//!
//! The owner task of a volume runs at most one of these calls per volume at a time, each with a timeout; it waits for
//! work that outlives its timeout (`operation.rs`) before it starts the next call. A plugin keeps no state except the
//! files that it writes beside its mounts. Every call is retried until it succeeds, so every call is idempotent.
//! Implements spec 07 §2.4, §4, §7, §12.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use tokio::sync::watch;

use super::{
    layout::PodLayout,
    operation::Operation,
    spec::{Mode, UniqueName, VolumeSpec},
};
use berth_ports::VolumeStats;
use berth_types::{Pod, PodUid};

/// Certainty of the state after a failed operation (spec 07 §2.4).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// The operation may have taken effect, or may still take effect.
    Uncertain,
    /// Nothing was attempted.
    Transient,
    /// The operation did not take effect and will not.
    Final,
}

/// Cause of a failure, where it needs special handling beyond its [`Class`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorCause {
    /// Any cause without special handling.
    Other,
    /// The volume is not attached: a part of staging that is reported under its own step name.
    NotAttached,
    /// The plugin does not support the operation (an expansion then counts as done).
    Unsupported,
    /// The volume cannot be expanded while it is in use (gRPC `FailedPrecondition`).
    InUse,
    /// A retry cannot succeed (gRPC `InvalidArgument`, `OutOfRange`, `NotFound`).
    Infeasible,
    /// The file system on the device differs from the one in the volume spec.
    WrongFilesystem,
}

/// Error of a volume operation.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{text}")]
pub struct OpError {
    /// Certainty of the state after the failure.
    pub class: Class,
    /// Cause with special handling, if any.
    pub trouble: ErrorCause,
    /// Message for events and logs; follows `MountVolume.SetUp failed for volume "x" : `.
    pub text: String,
}

impl OpError {
    /// Final error: the operation did not take effect.
    pub fn failed(text: impl Into<String>) -> Self {
        Self { class: Class::Final, trouble: ErrorCause::Other, text: text.into() }
    }

    /// Uncertain error: the operation may have taken effect.
    pub fn uncertain(text: impl Into<String>) -> Self {
        Self { class: Class::Uncertain, trouble: ErrorCause::Other, text: text.into() }
    }

    /// Transient error: nothing was attempted.
    pub fn transient(text: impl Into<String>) -> Self {
        Self { class: Class::Transient, trouble: ErrorCause::Other, text: text.into() }
    }

    /// Sets the cause of the error.
    #[must_use]
    pub fn with_cause(mut self, trouble: ErrorCause) -> Self {
        self.trouble = trouble;
        self
    }
}

/// Properties of a volume, as its plugin describes them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct VolumeTraits {
    /// Plugin's name for the volume (`<driver>^<handle>`); used only where pods share the volume.
    pub volume: String,
    /// Value of the metrics label `volume_plugin`: the plugin name, for CSI followed by `:<driver>`.
    pub label: String,
    /// Value of the metrics label `migrated`.
    pub is_migrated: bool,
    /// The volume must be attached to the node first (`node.status.volumesAttached`).
    pub attachable: bool,
    /// The volume is staged once for all pods of the node.
    pub stages: bool,
    /// The volume type accepts mount options.
    pub mount_options: bool,
    /// The volume is published again with every sync of its pod.
    pub republishes: bool,
    /// The plugin supports node-side expansion.
    pub expands: bool,
    /// The volume can be mounted with an SELinux label (`-o context`).
    pub supports_mount_label: bool,
}

impl VolumeTraits {
    /// Whether pods share the volume, so that all of them use one unique name (spec 07 §2.1).
    pub fn is_shared(&self) -> bool {
        self.attachable || self.stages
    }

    /// Returns the unique name of the volume on this node.
    pub fn unique(&self, plugin: &str, pod: &PodUid, spec: &VolumeSpec) -> UniqueName {
        if self.is_shared() {
            UniqueName::shared(plugin, &self.volume)
        } else {
            UniqueName::of_pod(plugin, pod, &spec.name)
        }
    }
}

/// Group ownership to apply to a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FsGroup {
    /// Group ID from `fsGroup`.
    pub group: u32,
    /// Policy is `fsGroupChangePolicy: OnRootMismatch`; otherwise `Always`.
    pub on_root_mismatch: bool,
}

/// One pod's use of one volume: all inputs of staging and publishing.
#[derive(Clone, Debug)]
pub struct Usage {
    /// Pod that uses the volume.
    pub pod: Arc<Pod>,
    /// Volume to stage and publish.
    pub spec: Arc<VolumeSpec>,
    /// Unique name of the volume on this node.
    pub unique: UniqueName,
    /// Volume mode in which the pod uses it: file system or block device.
    pub mode: Mode,
    /// Paths of the pod's directories.
    pub layout: PodLayout,
    /// Target path `pods/<uid>/volumes/<plugin~>/<spec name>`, not created yet; for a block device the symlink below
    /// `volumeDevices`.
    pub target: PathBuf,
    /// Device path from `node.status.volumesAttached`; empty where the status has none.
    pub device: String,
    /// Group to apply to the whole volume; `None` leaves the ownership unchanged.
    pub group: Option<FsGroup>,
    /// UID that all containers run as, if they share one.
    pub user: Option<u32>,
    /// SELinux label of the mount, if it has one.
    pub label: Option<String>,
    /// Another pod already has the volume mounted: its group ownership must then stay unchanged (spec 07 §7.6).
    pub has_other_users: bool,
    /// The pod already has the volume: a failure leaves the existing mount in place.
    pub is_republish: bool,
    /// The volume predates this agent: a failure leaves the existing mount in place.
    pub was_rebuilt: bool,
    /// Operation in progress; all blocking calls run through it.
    pub operation: Operation,
}

/// Unpublish or unstage request.
#[derive(Clone, Debug)]
pub struct Removal {
    /// Volume to remove; reconstructed from disk where no other source knows it.
    pub spec: Arc<VolumeSpec>,
    /// Unique name of the volume on this node.
    pub unique: UniqueName,
    /// Volume mode in which it is present.
    pub mode: Mode,
    /// Pod and target path to unpublish; `None` to unstage the part shared by all pods.
    pub pod: Option<(PodUid, PathBuf)>,
    /// Device path at which the volume is attached; empty where unknown.
    pub device: String,
    /// Operation in progress; all blocking calls run through it.
    pub operation: Operation,
}

/// Result of publishing a volume to a pod.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PublishedVolume {
    /// Directory to bind-mount into the container, or path of the block device.
    pub path: PathBuf,
    /// Whether the container runtime may relabel the volume for SELinux.
    pub relabel: bool,
}

/// Node-side expansion request.
#[derive(Clone, Debug)]
pub struct Expansion {
    /// Pod and volume to expand.
    pub usage: Usage,
    /// Path at which the volume was published.
    pub path: PathBuf,
    /// Current size in bytes.
    pub from: u64,
    /// Requested size in bytes.
    pub to: u64,
}

/// Volume directory or link found on disk at startup.
#[derive(Clone, Debug)]
pub struct FoundVolume {
    /// UID of the pod that it belongs to.
    pub pod: PodUid,
    /// Name of the volume directory.
    pub name: String,
    /// Volume mode: file system or block device.
    pub mode: Mode,
    /// Path below the pod's `volumes`, or the symlink below its `volumeDevices`.
    pub path: PathBuf,
}

/// Volume that a plugin reconstructed from disk.
#[derive(Clone, Debug)]
pub struct ReconstructedVolume {
    /// Volume spec, as complete as unpublish and unstage need.
    pub spec: VolumeSpec,
    /// Properties of the volume.
    pub traits: VolumeTraits,
    /// SELinux label of the existing mount, if it has one.
    pub label: Option<String>,
}

/// Volume plugin for volumes that are more than files written by the agent.
#[async_trait]
pub trait AttachableVolumePlugin: Send + Sync + 'static {
    /// Full plugin name, such as `kubernetes.io/csi`.
    fn name(&self) -> &'static str;

    /// Whether this plugin handles the volume.
    fn supports(&self, spec: &VolumeSpec) -> bool;

    /// Returns the properties of the volume. May query other components; called with every sync of the pod.
    async fn describe(&self, pod: &Pod, spec: &VolumeSpec) -> Result<VolumeTraits, OpError>;

    /// Whether the volume is attached, for plugins that know more than the node status; a returned path overrides the
    /// device path of the status.
    async fn attached(&self, usage: &Usage) -> Result<Option<String>, OpError> {
        let _usage = usage;
        Ok(None)
    }

    /// Prepares the volume once for all pods of the node; called only where [`VolumeTraits::stages`] is set.
    async fn stage(&self, usage: &Usage) -> Result<(), OpError> {
        let _usage = usage;
        Ok(())
    }

    /// Publishes the volume to the pod.
    async fn publish(&self, usage: &Usage) -> Result<PublishedVolume, OpError>;

    /// Unpublishes the volume from the pod.
    async fn unpublish(&self, removal: &Removal) -> Result<(), OpError>;

    /// Reverts [`stage`](Self::stage) once no pod uses the volume.
    async fn unstage(&self, removal: &Removal) -> Result<(), OpError> {
        let _removal = removal;
        Ok(())
    }

    /// Runs the node-side expansion; returns the resulting size in bytes.
    async fn expand(&self, expansion: &Expansion) -> Result<u64, OpError> {
        let _expansion = expansion;
        Err(OpError::failed("not supported").with_cause(ErrorCause::Unsupported))
    }

    /// Returns the usage statistics of the volume as published to the pod at that path.
    async fn fullness(&self, usage: &Usage, path: &Path) -> Result<VolumeStats, OpError> {
        let _asked = (usage, path);
        Err(OpError::failed("not supported").with_cause(ErrorCause::Unsupported))
    }

    /// Reconstructs a volume from a directory that an earlier agent left. Blocking; reads only metadata beside the
    /// volume, never the volume itself.
    ///
    /// # Errors
    /// If the volume cannot be identified.
    fn rebuild(&self, found: &FoundVolume) -> Result<ReconstructedVolume, String>;

    /// Lists the volumes that an earlier agent staged, whether or not a pod uses them. Blocking, as
    /// [`rebuild`](Self::rebuild).
    ///
    /// # Errors
    /// If some of the staged volumes cannot be identified.
    fn staged(&self) -> Result<Vec<(Mode, ReconstructedVolume)>, String> {
        Ok(Vec::new())
    }

    /// Returns the directory with one entry per pod that uses the block device (`globalMapPath`).
    fn map_dir(&self, root: &Path, spec: &VolumeSpec) -> PathBuf {
        root.join("plugins").join(self.name().replace('/', "~")).join("volumeDevices").join(&spec.name)
    }

    /// Whether the volume is not attached because the node reached its attach limit for such volumes.
    async fn is_over_limit(&self, usage: &Usage) -> bool {
        let _usage = usage;
        false
    }

    /// Timeout of one call; 120 seconds by default.
    fn limit(&self) -> Duration {
        Duration::from_secs(120)
    }

    /// Changes when a failure may have been resolved, such as by a driver registration; pending retries then run at
    /// once.
    fn recovered(&self) -> watch::Receiver<u64> {
        watch::channel(0).1
    }
}
