//! The role of the volumes room.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;

use berth_types::{Pod, PodUid};

/// A volume that containers can mount now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MountedVolume {
    /// The host path to bind; `None` for image volumes.
    pub host_path: Option<PathBuf>,
    /// The volume itself is read-only.
    pub read_only: bool,
    /// The volume is managed by us and may be relabelled for SELinux.
    pub relabel: bool,
    /// Mode of sub-path directories that are created in it.
    pub sub_path_mode: u32,
}

/// A device that containers can be given now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BlockVolume {
    /// A link to the device.
    pub host_path: PathBuf,
    /// Nobody may write to it.
    pub read_only: bool,
}

/// A pod's volumes by volume name.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MountedVolumes {
    /// By `spec.volumes[].name`.
    pub by_name: BTreeMap<String, MountedVolume>,
    /// Those that are devices.
    pub devices: BTreeMap<String, BlockVolume>,
    /// Groups that volumes ask for their containers (`pv.beta.kubernetes.io/gid`).
    pub groups: Vec<i64>,
}

/// Why volumes are not there. The text follows `Unable to attach or mount volumes: `.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum VolumeError {
    /// A volume's type is not supported (yet).
    #[error("volume {volume:?}: {kind} volumes are not supported by this release")]
    Unsupported {
        /// Volume name.
        volume: String,
        /// The type as the API spells it, e.g. `configMap`.
        kind: String,
    },
    /// A mount failed.
    #[error("{0}")]
    Failed(String),
    /// Volumes that are files of this agent could not be made; each cause is an event of its own, as in the reference.
    #[error("{text}")]
    NotSetUp {
        /// Which ones, and all causes.
        text: String,
        /// `MountVolume.SetUp failed for volume …`, each once.
        causes: Vec<String>,
    },
    /// They cannot come: the node takes no more volumes. The text is that of the pod's rejection.
    #[error("{0}")]
    LimitExceeded(String),
    /// They did not come in time; each failure on the way was told already.
    #[error("{0}")]
    TimedOut(String),
}

/// How full a volume is.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Fullness {
    /// Who says so: `statfs`, or the name of a storage driver.
    pub source: String,
    /// Bytes there are.
    pub capacity: u64,
    /// Bytes that can be used.
    pub available: u64,
    /// Bytes in use.
    pub used: u64,
    /// Inodes there are.
    pub inodes: u64,
    /// Inodes that are free.
    pub inodes_free: u64,
    /// Inodes in use.
    pub inodes_used: u64,
    /// Whether it is well, where somebody says.
    pub condition: Option<Condition>,
}

/// How a volume is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Condition {
    /// Something is wrong with it.
    pub is_abnormal: bool,
    /// What, for people.
    pub message: String,
}

/// A volume behind a claim that a pod has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClaimedVolume {
    /// Its name in the pod.
    pub volume: String,
    /// Namespace and name of the claim.
    pub claim: (String, String),
    /// Its place in the pod.
    pub path: PathBuf,
}

/// Volumes behind claims, for those who tell how full they are.
#[async_trait]
pub trait ClaimedVolumes: Send + Sync + 'static {
    /// Those that the pod has now.
    fn of(&self, pod: &PodUid) -> Vec<ClaimedVolume>;
    /// How full the one at that place is. Answers within seconds.
    async fn fullness(&self, path: &Path) -> Result<Fullness, String>;
}

/// Mounts and unmounts. Each call touches one pod only and has its own deadline.
#[async_trait]
pub trait VolumeManager: Send + Sync + 'static {
    /// Makes all volumes of the pod usable. Idempotent; refreshes what changes (downward API).
    async fn mount(&self, pod: &Arc<Pod>) -> Result<Arc<MountedVolumes>, VolumeError>;
    /// Unmounts and removes the volumes of a terminated pod.
    async fn unmount(&self, pod: &PodUid) -> Result<(), VolumeError>;
    /// UIDs of all pods that have a directory on disk.
    async fn pods_on_disk(&self) -> Vec<PodUid>;
    /// Removes the directory of a pod that is neither desired nor in the runtime; refuses
    /// while anything is mounted below it, and never crosses a mount.
    async fn remove_directory(&self, pod: &PodUid) -> Result<(), VolumeError>;
}
