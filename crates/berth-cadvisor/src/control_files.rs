//! Tables of the cgroup files that statistics read. Pure.
//!
//! Cgroup v1 and v2 have one table each: file name, controller, and the depth from which on a reading includes it.

use super::reading::Depth;

/// A cgroup v1 hierarchy; in v2 all files are in one tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tree {
    /// `cpu`
    Cpu,
    /// `cpuacct`
    Cpuacct,
    /// `memory`
    Memory,
    /// `pids`
    Pids,
    /// `blkio`
    Blkio,
}

impl Tree {
    /// All hierarchies, in the order of their declaration.
    pub const ALL: [Self; 5] = [Self::Cpu, Self::Cpuacct, Self::Memory, Self::Pids, Self::Blkio];

    /// Kernel name of the controller.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cpuacct => "cpuacct",
            Self::Memory => "memory",
            Self::Pids => "pids",
            Self::Blkio => "blkio",
        }
    }
}

/// Content type of a cgroup file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ControlFileKind {
    /// `cpu.stat` of cgroup v2.
    CpuStat,
    /// `cpuacct.usage`.
    CpuUsage,
    /// `cpuacct.stat`.
    CpuSplit,
    /// `cpu.stat` of cgroup v1.
    Throttling,
    /// `cpu.max`.
    CpuMax,
    /// `cpu.weight`.
    CpuWeight,
    /// `cpu.shares`.
    CpuShares,
    /// `cpu.cfs_quota_us`.
    CpuQuota,
    /// `cpu.cfs_period_us`.
    CpuPeriod,
    /// `memory.current`, `memory.usage_in_bytes`.
    MemoryUsage,
    /// `memory.stat` of cgroup v2.
    MemoryStat,
    /// `memory.stat` of cgroup v1.
    OldMemoryStat,
    /// `memory.max`, `memory.limit_in_bytes`.
    MemoryLimit,
    /// `memory.swap.current`.
    SwapUsage,
    /// `memory.swap.max`.
    SwapLimit,
    /// `memory.memsw.limit_in_bytes`.
    MemoryAndSwapLimit,
    /// `memory.min`, `memory.soft_limit_in_bytes`.
    MemoryReserved,
    /// `memory.peak`, `memory.max_usage_in_bytes`.
    MemoryPeak,
    /// `memory.events`, `memory.oom_control`.
    MemoryEvents,
    /// `memory.failcnt`.
    MemoryFailures,
    /// `memory.kmem.usage_in_bytes`.
    MemoryKernel,
    /// `cpu.pressure`.
    CpuPressure,
    /// `memory.pressure`.
    MemoryPressure,
    /// `io.pressure`.
    IoPressure,
    /// `cgroup.procs`.
    Processes,
    /// `pids.current`.
    Threads,
    /// `pids.max`.
    ThreadsMax,
    /// `io.stat`.
    IoStat,
    /// `blkio.throttle.io_service_bytes_recursive`.
    BlkioBytes,
    /// `blkio.throttle.io_serviced_recursive`.
    BlkioCounts,
}

impl ControlFileKind {
    /// Whether the value changes whenever a process in the cgroup runs or uses memory.
    pub fn is_clock(self) -> bool {
        matches!(self, Self::CpuStat | Self::CpuUsage | Self::MemoryUsage)
    }

    /// Whether the value may change without activity in the cgroup: while tasks wait, and when the kernel writes dirty
    /// pages back later.
    pub fn changes_alone(self) -> bool {
        let is_pressure = matches!(self, Self::CpuPressure | Self::MemoryPressure | Self::IoPressure);
        is_pressure || matches!(self, Self::IoStat | Self::BlkioBytes | Self::BlkioCounts)
    }
}

/// An entry of the table of cgroup files.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ControlFile {
    /// The cgroup v1 hierarchy that contains it.
    pub tree: Tree,
    /// File name.
    pub name: &'static str,
    /// Content type.
    pub content: ControlFileKind,
    /// Lowest depth of a reading that includes the file.
    pub depth: Depth,
    /// Whether the file changes only when it is written.
    pub is_setting: bool,
}

const fn file(depth: Depth, tree: Tree, name: &'static str, content: ControlFileKind) -> ControlFile {
    ControlFile { tree, name, content, depth, is_setting: false }
}

const fn setting(depth: Depth, tree: Tree, name: &'static str, content: ControlFileKind) -> ControlFile {
    ControlFile { tree, name, content, depth, is_setting: true }
}

/// Returns the table of cgroup v2 or v1.
pub fn files(is_unified: bool) -> &'static [ControlFile] {
    if is_unified { UNIFIED } else { OLD }
}

const UNIFIED: &[ControlFile] = &[
    file(Depth::Core, Tree::Cpu, "cpu.stat", ControlFileKind::CpuStat),
    file(Depth::Core, Tree::Memory, "memory.current", ControlFileKind::MemoryUsage),
    file(Depth::Core, Tree::Memory, "memory.stat", ControlFileKind::MemoryStat),
    file(Depth::Core, Tree::Memory, "memory.swap.current", ControlFileKind::SwapUsage),
    setting(Depth::Core, Tree::Memory, "memory.max", ControlFileKind::MemoryLimit),
    setting(Depth::Core, Tree::Memory, "memory.swap.max", ControlFileKind::SwapLimit),
    file(Depth::Summary, Tree::Cpu, "cpu.pressure", ControlFileKind::CpuPressure),
    file(Depth::Summary, Tree::Memory, "memory.pressure", ControlFileKind::MemoryPressure),
    file(Depth::Summary, Tree::Blkio, "io.pressure", ControlFileKind::IoPressure),
    file(Depth::Summary, Tree::Pids, "cgroup.procs", ControlFileKind::Processes),
    setting(Depth::Full, Tree::Cpu, "cpu.max", ControlFileKind::CpuMax),
    setting(Depth::Full, Tree::Cpu, "cpu.weight", ControlFileKind::CpuWeight),
    setting(Depth::Full, Tree::Memory, "memory.min", ControlFileKind::MemoryReserved),
    file(Depth::Full, Tree::Memory, "memory.peak", ControlFileKind::MemoryPeak),
    file(Depth::Full, Tree::Memory, "memory.events", ControlFileKind::MemoryEvents),
    file(Depth::Full, Tree::Pids, "pids.current", ControlFileKind::Threads),
    setting(Depth::Full, Tree::Pids, "pids.max", ControlFileKind::ThreadsMax),
    file(Depth::Full, Tree::Blkio, "io.stat", ControlFileKind::IoStat),
];

const OLD: &[ControlFile] = &[
    file(Depth::Core, Tree::Cpuacct, "cpuacct.usage", ControlFileKind::CpuUsage),
    file(Depth::Core, Tree::Memory, "memory.usage_in_bytes", ControlFileKind::MemoryUsage),
    file(Depth::Core, Tree::Memory, "memory.stat", ControlFileKind::OldMemoryStat),
    setting(Depth::Core, Tree::Memory, "memory.limit_in_bytes", ControlFileKind::MemoryLimit),
    setting(Depth::Core, Tree::Memory, "memory.memsw.limit_in_bytes", ControlFileKind::MemoryAndSwapLimit),
    file(Depth::Summary, Tree::Pids, "cgroup.procs", ControlFileKind::Processes),
    file(Depth::Full, Tree::Cpuacct, "cpuacct.stat", ControlFileKind::CpuSplit),
    setting(Depth::Full, Tree::Cpu, "cpu.shares", ControlFileKind::CpuShares),
    setting(Depth::Full, Tree::Cpu, "cpu.cfs_quota_us", ControlFileKind::CpuQuota),
    // Read only for cgroups with a CPU quota.
    file(Depth::Full, Tree::Cpu, "cpu.stat", ControlFileKind::Throttling),
    setting(Depth::Full, Tree::Cpu, "cpu.cfs_period_us", ControlFileKind::CpuPeriod),
    setting(Depth::Full, Tree::Memory, "memory.soft_limit_in_bytes", ControlFileKind::MemoryReserved),
    file(Depth::Full, Tree::Memory, "memory.max_usage_in_bytes", ControlFileKind::MemoryPeak),
    file(Depth::Full, Tree::Memory, "memory.oom_control", ControlFileKind::MemoryEvents),
    file(Depth::Full, Tree::Memory, "memory.failcnt", ControlFileKind::MemoryFailures),
    file(Depth::Full, Tree::Memory, "memory.kmem.usage_in_bytes", ControlFileKind::MemoryKernel),
    file(Depth::Full, Tree::Pids, "pids.current", ControlFileKind::Threads),
    setting(Depth::Full, Tree::Pids, "pids.max", ControlFileKind::ThreadsMax),
    file(Depth::Full, Tree::Blkio, "blkio.throttle.io_service_bytes_recursive", ControlFileKind::BlkioBytes),
    file(Depth::Full, Tree::Blkio, "blkio.throttle.io_serviced_recursive", ControlFileKind::BlkioCounts),
];
