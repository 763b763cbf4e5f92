//! Cgroup mounts, and the tables of the cgroup files that statistics read. Pure.
//!
//! Cgroup v1 and v2 have one table each: file name, controller, and the depth from which on a reading includes it.

use std::path::{Path, PathBuf};

use super::reading::Depth;
use berth_sys::mount_table::Mount;

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
    const ALL: [Self; 5] = [Self::Cpu, Self::Cpuacct, Self::Memory, Self::Pids, Self::Blkio];

    fn as_str(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cpuacct => "cpuacct",
            Self::Memory => "memory",
            Self::Pids => "pids",
            Self::Blkio => "blkio",
        }
    }
}

/// Mount points of the cgroup hierarchies.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Mounts {
    /// Cgroup v1, also in hybrid mode; `None` where a hierarchy is absent. In the order of [`Tree`].
    Old([Option<PathBuf>; 5]),
    /// Cgroup v2.
    Unified(PathBuf),
}

impl Mounts {
    /// Finds the mounts. V1 takes precedence, because the v2 hierarchy has no controllers in hybrid mode. Of a
    /// hierarchy that is mounted several times, the shortest path is used.
    pub fn find(mounts: &[Mount]) -> Option<Self> {
        let tree = |tree: Tree| {
            let of_tree =
                mounts.iter().filter(|m| m.kind == "cgroup" && m.options.split(',').any(|o| o == tree.as_str()));
            of_tree.map(|m| m.target.clone()).min_by_key(|target| target.as_os_str().len())
        };
        let old = Tree::ALL.map(tree);
        if old.iter().any(Option::is_some) {
            return Some(Self::Old(old));
        }
        mounts.iter().find(|m| m.kind == "cgroup2").map(|m| Self::Unified(m.target.clone()))
    }

    /// Returns the table of cgroup files.
    pub fn files(&self) -> &'static [ControlFile] {
        match self {
            Self::Old(_) => OLD,
            Self::Unified(_) => UNIFIED,
        }
    }

    /// Path of a cgroup's file; `None` where its hierarchy is not mounted.
    pub fn place(&self, group: &str, file: &ControlFile) -> Option<PathBuf> {
        Some(self.directory(group, file.tree)?.join(file.name))
    }

    /// Existing directories of a cgroup that contain settings.
    pub fn directories_of_settings(&self, group: &str) -> Vec<PathBuf> {
        let trees: &[Tree] = match self {
            Self::Unified(_) => &[Tree::Cpu],
            Self::Old(_) => &[Tree::Cpu, Tree::Memory, Tree::Pids],
        };
        trees.iter().filter_map(|tree| self.directory(group, *tree)).filter(|directory| directory.is_dir()).collect()
    }

    /// Directory of a cgroup.
    pub fn directory(&self, group: &str, tree: Tree) -> Option<PathBuf> {
        let root: &Path = match self {
            Self::Unified(root) => root,
            Self::Old(trees) => trees.get(tree as usize)?.as_deref()?,
        };
        Some(root.join(group.trim_start_matches('/')))
    }

    /// Whether this is cgroup v2.
    pub fn is_unified(&self) -> bool {
        matches!(self, Self::Unified(_))
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

/// Candidate paths of the cgroup of a container or sandbox below its pod, by cgroup driver and runtime: containerd,
/// CRI-O, Berth.
pub fn container_places(pod: &str, id: &str) -> [String; 5] {
    let pod = pod.trim_end_matches('/');
    [
        format!("{pod}/{id}"),
        format!("{pod}/cri-containerd-{id}.scope"),
        format!("{pod}/crio-{id}.scope"),
        format!("{pod}/crio-{id}"),
        format!("{pod}/berth-{id}.scope"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(target: &str, kind: &str, options: &str) -> Mount {
        Mount {
            device: String::new(),
            target: target.into(),
            kind: kind.into(),
            is_shared: false,
            is_slave: false,
            options: options.into(),
        }
    }

    #[test]
    fn hierarchies_are_found() {
        let unified = [mount("/", "ext4", "rw"), mount("/sys/fs/cgroup", "cgroup2", "rw")];
        assert_eq!(Mounts::find(&unified), Some(Mounts::Unified("/sys/fs/cgroup".into())));
        assert_eq!(Mounts::find(&unified[..1]), None);
        let hybrid = [
            mount("/mnt/longer/than/cpu", "cgroup", "rw,cpu,cpuacct"),
            mount("/c/cpu,cpuacct", "cgroup", "rw,cpu,cpuacct"),
            mount("/c/memory", "cgroup", "rw,memory"),
            mount("/c/unified", "cgroup2", "rw"),
        ];
        let found = Mounts::find(&hybrid).expect("old ones");
        let place = |name: &str| {
            let file = found.files().iter().find(|f| f.name == name).expect("in the table");
            found.place("/kubepods/podx", file)
        };
        assert_eq!(place("cpuacct.usage"), Some("/c/cpu,cpuacct/kubepods/podx/cpuacct.usage".into()));
        assert_eq!(place("memory.stat"), Some("/c/memory/kubepods/podx/memory.stat".into()));
        assert_eq!(place("pids.max"), None);
        assert!(!found.is_unified());
    }

    #[test]
    fn containers_have_their_places() {
        let places = container_places("/kubepods/podx", "c1");
        assert_eq!(
            places,
            ["c1", "cri-containerd-c1.scope", "crio-c1.scope", "crio-c1", "berth-c1.scope"]
                .map(|name| format!("/kubepods/podx/{name}"))
        );
    }
}
