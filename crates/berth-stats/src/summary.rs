//! Types of the stats summary: resource usage of the node and its pods. Pure.
//!
//! Values only: inputs ([`RuntimeReport`], [`PodPaths`]) and output ([`StatsSummary`], as served by `/stats/summary`).
//! Implements spec 04b §7.

use std::{collections::HashMap, path::PathBuf};

use jiff::Timestamp;

use super::{cgroup_files::PressureStats, disk::FileSystem, host::Processes, network::NetworkInterfaces};
use berth_types::{ContainerId, PodRef};

/// Seconds since the epoch.
pub type Seconds = i64;

/// Response of `/stats/summary`.
#[derive(Clone, PartialEq, Debug)]
pub struct StatsSummary {
    /// Statistics of the node.
    pub node: NodeStats,
    /// Pods with a running container, sorted by namespace, name, and UID.
    pub pods: Vec<PodStats>,
}

/// Statistics of the node.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct NodeStats {
    /// Node name.
    pub name: String,
    /// System containers (cgroups of the system), sorted by name.
    pub system: Vec<ContainerStats>,
    /// Boot time in the full form; creation time of the root cgroup in the short form.
    pub started_at: Seconds,
    /// Usage of the whole node.
    pub usage: Resources,
    /// Network of the node.
    pub network: Option<NetworkStats>,
    /// The file system of the agent's root directory.
    pub fs: Option<FsStats>,
    /// File systems of images and of containers.
    pub runtime: Option<(Option<FsStats>, Option<FsStats>)>,
    /// Number of processes, and when it was read.
    pub rlimit: Option<(Seconds, Processes)>,
}

/// Statistics of a pod.
#[derive(Clone, PartialEq, Debug)]
pub struct PodStats {
    /// UID, name, and namespace.
    pub id: PodRef,
    /// Creation time of the sandbox.
    pub started_at: Seconds,
    /// Running containers.
    pub containers: Vec<ContainerStats>,
    /// Usage of the whole pod.
    pub usage: Resources,
    /// Network of the pod.
    pub network: Option<NetworkStats>,
    /// Volumes, sorted by name.
    pub volumes: Vec<VolumeStats>,
    /// Usage of the node's local storage.
    pub ephemeral_storage: Option<FsStats>,
    /// Number of processes in its containers.
    pub processes: Option<u64>,
}

/// Statistics of a container or a system container.
#[derive(Clone, PartialEq, Debug)]
pub struct ContainerStats {
    /// Container name.
    pub name: String,
    /// Creation time of a container; start time of a system container.
    pub started_at: Timestamp,
    /// Resource usage.
    pub usage: Resources,
    /// Usage of the writable layer.
    pub rootfs: Option<FsStats>,
    /// Usage of the logs.
    pub logs: Option<FsStats>,
}

/// CPU, memory, swap, and pressure of a node, pod, or container.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Resources {
    /// CPU usage.
    pub cpu: Option<CpuStats>,
    /// Memory usage.
    pub memory: Option<MemoryStats>,
    /// I/O pressure, and when it was read.
    pub io: Option<(WallNs, PressureStats)>,
    /// Swap usage.
    pub swap: Option<SwapStats>,
}

pub use super::reading::WallNs;

/// CPU usage.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct CpuStats {
    /// Time of the reading.
    pub at: WallNs,
    /// Current usage, billionths of a core.
    pub usage_nano_cores: Option<u64>,
    /// Cumulative usage, core-nanoseconds.
    pub usage_core_nano_seconds: Option<u64>,
    /// CPU pressure.
    pub psi: Option<PressureStats>,
}

/// Memory usage, bytes.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct MemoryStats {
    /// Time of the reading.
    pub at: WallNs,
    /// Remainder below the limit.
    pub available: Option<u64>,
    /// Memory in use, page cache included.
    pub usage: Option<u64>,
    /// Memory in use that cannot be reclaimed at once.
    pub working_set: Option<u64>,
    /// Anonymous memory.
    pub rss: Option<u64>,
    /// Number of page faults.
    pub page_faults: Option<u64>,
    /// Number of page faults that required I/O.
    pub major_page_faults: Option<u64>,
    /// Memory pressure.
    pub psi: Option<PressureStats>,
}

/// Swap usage, bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SwapStats {
    /// Time of the reading.
    pub at: WallNs,
    /// Remainder below the limit.
    pub available: Option<u64>,
    /// Swap in use.
    pub usage: Option<u64>,
}

/// Usage of a file system, or of a directory in one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FsStats {
    /// Time of the measurement.
    pub at: Seconds,
    /// Available bytes.
    pub available: Option<u64>,
    /// Capacity, bytes.
    pub capacity: Option<u64>,
    /// Used bytes.
    pub used: Option<u64>,
    /// Free inodes of the whole file system (`inodesFree`).
    pub inodes_free: Option<u64>,
    /// Total inodes.
    pub inodes: Option<u64>,
    /// Used inodes of the directory, or of the whole file system where no directory is measured.
    pub inodes_used: Option<u64>,
}

/// Network counters.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NetworkStats {
    /// Time of the reading.
    pub at: WallNs,
    /// Interfaces with their counters.
    pub network: NetworkInterfaces,
}

/// Usage of a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VolumeStats {
    /// Volume name in the pod.
    pub name: String,
    /// Claim behind the volume: namespace and name.
    pub claim: Option<(String, String)>,
    /// Usage of its file system.
    pub fs: FsStats,
    /// Whether the volume's condition is abnormal; `None` where its driver reports none.
    pub is_abnormal: Option<bool>,
}

/// Statistics of one container as the runtime reports them.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct RuntimeUsage {
    /// CPU, memory, swap, and pressure.
    pub usage: Resources,
    /// Usage of the writable layer.
    pub layer: Option<LayerUsage>,
}

/// Statistics of one pod as the runtime reports them, where it is the configured source.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct RuntimePod {
    /// CPU, memory, swap, and pressure.
    pub usage: Resources,
    /// Network of the pod.
    pub network: Option<NetworkStats>,
    /// Number of processes.
    pub processes: Option<u64>,
    /// Containers by ID.
    pub containers: HashMap<ContainerId, RuntimeUsage>,
}

/// Usage of a directory of the runtime: a writable layer, or all images.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LayerUsage {
    /// Time of the measurement.
    pub at: WallNs,
    /// Used bytes.
    pub used: Option<u64>,
    /// Used inodes; `None` if the runtime does not report them.
    pub inodes_used: Option<u64>,
    /// Mount point of its file system.
    pub mountpoint: String,
}

/// Statistics of containers and image file systems as the runtime reports them.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct RuntimeReport {
    /// Containers by ID.
    pub containers: HashMap<ContainerId, RuntimeUsage>,
    /// Image file system.
    pub images: Option<LayerUsage>,
    /// File system of writable layers, where it differs from that of images.
    pub layers: Option<LayerUsage>,
    /// File systems by the mount points above.
    pub filesystems: HashMap<String, FileSystem>,
}

/// Directories of a pod on the node's disk.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PodPaths {
    /// Log directory.
    pub logs: PathBuf,
    /// Hosts file.
    pub etc_hosts: Option<PathBuf>,
    /// Directory that contains a directory of termination messages per container.
    pub messages: Option<PathBuf>,
    /// Measurable volumes.
    pub volumes: Vec<VolumePath>,
}

/// Location of a pod's volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VolumePath {
    /// Volume name in the pod.
    pub name: String,
    /// Directory of the volume.
    pub path: PathBuf,
    /// Storage that the volume uses.
    pub storage: Storage,
    /// Claim behind the volume: namespace and name.
    pub claim: Option<(String, String)>,
}

/// Storage that a volume uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Storage {
    /// Storage of the node, which counts toward the pod's ephemeral storage.
    Ephemeral,
    /// Memory, or storage outside of the node's.
    Other,
}

/// Extent of a summary.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// All values.
    Full,
    /// CPU, memory, and swap only.
    Short,
}
