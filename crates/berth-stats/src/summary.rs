//! The summary: what the node and its pods use, as consumers of `/stats/summary` know it. Pure.
//!
//! Values only: what is read ([`RuntimeReport`], [`PodPlaces`]) and what is shown ([`Summary`]).
//! Behaviour: spec 04b §7.

use std::{collections::HashMap, path::PathBuf};

use jiff::Timestamp;

use super::{cgroup_files::Stalls, disk::FileSystem, host::Processes, network::Network};
use berth_types::{ContainerId, PodRef};

/// Seconds since the epoch.
pub type Seconds = i64;

/// The document.
#[derive(Clone, PartialEq, Debug)]
pub struct Summary {
    /// The node.
    pub node: NodeStats,
    /// Pods with a running container, by namespace, name and UID.
    pub pods: Vec<PodStats>,
}

/// The node.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct NodeStats {
    /// Its name.
    pub name: String,
    /// Groups of the system, by name.
    pub system: Vec<ContainerStats>,
    /// When it started.
    pub started_at: Seconds,
    /// What all use together.
    pub usage: Resources,
    /// Its network.
    pub network: Option<NetworkStats>,
    /// The file system of the agent's root directory.
    pub fs: Option<FsStats>,
    /// File systems of images and of containers.
    pub runtime: Option<(Option<FsStats>, Option<FsStats>)>,
    /// Processes.
    pub rlimit: Option<(Seconds, Processes)>,
}

/// A pod.
#[derive(Clone, PartialEq, Debug)]
pub struct PodStats {
    /// Who it is.
    pub id: PodRef,
    /// When its sandbox was made.
    pub started_at: Seconds,
    /// Its running containers.
    pub containers: Vec<ContainerStats>,
    /// What all use together.
    pub usage: Resources,
    /// Its network.
    pub network: Option<NetworkStats>,
    /// Its volumes, by name.
    pub volumes: Vec<VolumeStats>,
    /// What it takes of the node's disk.
    pub ephemeral_storage: Option<FsStats>,
    /// Processes of its containers.
    pub processes: Option<u64>,
}

/// A container, or a group of the system.
#[derive(Clone, PartialEq, Debug)]
pub struct ContainerStats {
    /// Its name.
    pub name: String,
    /// When it was made.
    pub started_at: Timestamp,
    /// What it uses.
    pub usage: Resources,
    /// Its writable layer.
    pub rootfs: Option<FsStats>,
    /// Its logs.
    pub logs: Option<FsStats>,
}

/// Processor, memory, swap and pressure of anything.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Resources {
    /// Processor.
    pub cpu: Option<CpuStats>,
    /// Memory.
    pub memory: Option<MemoryStats>,
    /// Pressure on input and output.
    pub io: Option<(WallNs, Stalls)>,
    /// Swap.
    pub swap: Option<SwapStats>,
}

pub use super::reading::WallNs;

/// Processor.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct CpuStats {
    /// When it was read.
    pub at: WallNs,
    /// Billionths of a core in use.
    pub usage_nano_cores: Option<u64>,
    /// Nanoseconds of a core used so far.
    pub usage_core_nano_seconds: Option<u64>,
    /// Pressure.
    pub psi: Option<Stalls>,
}

/// Memory, bytes.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct MemoryStats {
    /// When it was read.
    pub at: WallNs,
    /// Left below the limit.
    pub available: Option<u64>,
    /// In use.
    pub usage: Option<u64>,
    /// In use and not to be taken back at once.
    pub working_set: Option<u64>,
    /// Anonymous.
    pub rss: Option<u64>,
    /// Page faults.
    pub page_faults: Option<u64>,
    /// Those that had to read.
    pub major_page_faults: Option<u64>,
    /// Pressure.
    pub psi: Option<Stalls>,
}

/// Swap, bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SwapStats {
    /// When it was read.
    pub at: WallNs,
    /// Left below the limit.
    pub available: Option<u64>,
    /// In use.
    pub usage: Option<u64>,
}

/// A file system, or a part of one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FsStats {
    /// When it was read.
    pub at: Seconds,
    /// Bytes left.
    pub available: Option<u64>,
    /// Bytes altogether.
    pub capacity: Option<u64>,
    /// Bytes in use.
    pub used: Option<u64>,
    /// Inodes left.
    pub inodes_free: Option<u64>,
    /// Inodes altogether.
    pub inodes: Option<u64>,
    /// Inodes in use.
    pub inodes_used: Option<u64>,
}

/// A network.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NetworkStats {
    /// When it was read.
    pub at: WallNs,
    /// Its interfaces.
    pub network: Network,
}

/// A volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VolumeStats {
    /// Its name in the pod.
    pub name: String,
    /// The claim behind it, by namespace and name.
    pub claim: Option<(String, String)>,
    /// What it takes.
    pub fs: FsStats,
    /// Whether something is wrong with it, where somebody says.
    pub is_abnormal: Option<bool>,
}

/// What the runtime tells of one container.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct RuntimeUsage {
    /// Processor, memory, swap and pressure.
    pub usage: Resources,
    /// The writable layer.
    pub layer: Option<LayerUsage>,
}

/// What the runtime tells of one pod, where it is the source of statistics.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct RuntimePod {
    /// Processor, memory, swap and pressure.
    pub usage: Resources,
    /// Its network.
    pub network: Option<NetworkStats>,
    /// Its processes.
    pub processes: Option<u64>,
    /// Its containers.
    pub containers: HashMap<ContainerId, RuntimeUsage>,
}

/// A directory of the runtime: a writable layer or all images.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LayerUsage {
    /// When it was measured.
    pub at: WallNs,
    /// Bytes.
    pub used: Option<u64>,
    /// Inodes.
    pub inodes_used: Option<u64>,
    /// Where its file system is mounted.
    pub mountpoint: String,
}

/// What the runtime tells.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct RuntimeReport {
    /// By container.
    pub containers: HashMap<ContainerId, RuntimeUsage>,
    /// Images.
    pub images: Option<LayerUsage>,
    /// Writable layers, where they lie elsewhere.
    pub layers: Option<LayerUsage>,
    /// File systems by the mount points above.
    pub filesystems: HashMap<String, FileSystem>,
}

/// Directories of a pod on the node's disk.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PodPlaces {
    /// Its log directory.
    pub logs: PathBuf,
    /// Its hosts file.
    pub etc_hosts: Option<PathBuf>,
    /// Where the termination messages of its containers are, in a directory each.
    pub messages: Option<PathBuf>,
    /// Its volumes that can be measured.
    pub volumes: Vec<VolumePlace>,
}

/// A volume of a pod.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VolumePlace {
    /// Its name in the pod.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
    /// Whose disk it takes.
    pub storage: Storage,
    /// The claim behind it, by namespace and name.
    pub claim: Option<(String, String)>,
}

/// Whose disk a volume takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Storage {
    /// The node's: it counts for the pod's ephemeral storage.
    Ephemeral,
    /// Memory, or something else than the node's disk.
    Other,
}

/// How much a summary tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// Everything.
    Full,
    /// Processor, memory and swap.
    Short,
}
