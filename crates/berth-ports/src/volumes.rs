//! Port of the volume manager: mount, unmount, and usage of pod volumes (`VolumeManager`).

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;

use berth_types::{Pod, PodUid};

/// A volume that containers can mount.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MountedVolume {
    /// Host path to bind-mount; `None` for image volumes.
    pub host_path: Option<PathBuf>,
    /// Whether the volume itself is read-only.
    pub read_only: bool,
    /// Whether the agent manages the volume and may relabel it for SELinux.
    pub relabel: bool,
    /// Mode of subPath directories created in the volume.
    pub sub_path_mode: u32,
}

/// A raw block volume that containers can use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BlockVolume {
    /// Symbolic link to the block device.
    pub host_path: PathBuf,
    /// Whether the device is read-only.
    pub read_only: bool,
}

/// Mounted volumes of a pod.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MountedVolumes {
    /// File system volumes by `spec.volumes[].name`.
    pub by_name: BTreeMap<String, MountedVolume>,
    /// Block volumes by `spec.volumes[].name`.
    pub devices: BTreeMap<String, BlockVolume>,
    /// Supplemental groups that volumes request (`pv.beta.kubernetes.io/gid`).
    pub groups: Vec<i64>,
}

/// Why volumes are not mounted. The text follows `Unable to attach or mount volumes: `.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum VolumeError {
    /// The volume type is not supported (yet).
    #[error("volume {volume:?}: {kind} volumes are not supported by this release")]
    Unsupported {
        /// Volume name.
        volume: String,
        /// Volume type as the API spells it, e.g. `configMap`.
        kind: String,
    },
    /// A mount failed.
    #[error("{0}")]
    Failed(String),
    /// Local volumes written by the agent could not be set up; each cause is an event of its own, as in the kubelet.
    #[error("{text}")]
    NotSetUp {
        /// The volumes, and all causes.
        text: String,
        /// `MountVolume.SetUp failed for volume …`, without duplicates.
        causes: Vec<String>,
    },
    /// The node's volume limit is exceeded: permanent. The text is that of the pod's rejection.
    #[error("{0}")]
    LimitExceeded(String),
    /// The volumes were not ready before the deadline; each failure was already reported when it occurred.
    #[error("{0}")]
    TimedOut(String),
}

/// Usage of a volume.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct VolumeStats {
    /// Source of the numbers: `statfs`, or the name of a CSI driver.
    pub source: String,
    /// Total bytes.
    pub capacity: u64,
    /// Available bytes.
    pub available: u64,
    /// Used bytes.
    pub used: u64,
    /// Total inodes.
    pub inodes: u64,
    /// Free inodes; of a CSI volume as the driver reports them, 0 if it does not.
    pub inodes_free: u64,
    /// Total minus free inodes; of a CSI volume as the driver reports them.
    pub inodes_used: u64,
    /// Volume condition, if the driver reports one.
    pub condition: Option<VolumeCondition>,
}

/// Health of a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VolumeCondition {
    /// Whether the volume is abnormal.
    pub is_abnormal: bool,
    /// Description for people.
    pub message: String,
}

/// A volume of a pod that is backed by a PersistentVolumeClaim.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClaimedVolume {
    /// Volume name in the pod.
    pub volume: String,
    /// Namespace and name of the claim.
    pub claim: (String, String),
    /// Path of the volume in the pod's directory.
    pub path: PathBuf,
}

/// Claimed volumes, for volume statistics and health.
#[async_trait]
pub trait ClaimedVolumes: Send + Sync + 'static {
    /// Claimed volumes that the pod has now.
    fn of(&self, pod: &PodUid) -> Vec<ClaimedVolume>;
    /// Usage of the volume at that path. Returns within seconds.
    async fn usage(&self, path: &Path) -> Result<VolumeStats, String>;
}

/// Mounts and unmounts volumes. Each call affects one pod only and has its own deadline.
#[async_trait]
pub trait VolumeManager: Send + Sync + 'static {
    /// Mounts all volumes of the pod. Idempotent; refreshes content that changes (downward API).
    async fn mount(&self, pod: &Arc<Pod>) -> Result<Arc<MountedVolumes>, VolumeError>;
    /// Unmounts and deletes the volumes of a terminated pod.
    async fn unmount(&self, pod: &PodUid) -> Result<(), VolumeError>;
    /// UIDs of all pods with a directory on disk.
    async fn pods_on_disk(&self) -> Vec<PodUid>;
    /// Deletes the directory of a pod that is neither desired nor in the runtime; refuses while anything is mounted
    /// below it, and never crosses a mount.
    async fn remove_directory(&self, pod: &PodUid) -> Result<(), VolumeError>;
}
