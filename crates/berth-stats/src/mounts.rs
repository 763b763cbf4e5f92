//! Where control groups are mounted, and which of their files are read. Pure.
//!
//! The files of both kinds of hierarchy are one table each: name, controller, and how deep a look
//! must be to need it.

use std::path::{Path, PathBuf};

use super::reading::Depth;
use berth_sys::mount_table::Mount;

/// A tree of the old hierarchies; on the unified one all files lie in one tree.
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

/// Where they are mounted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Mounts {
    /// The old hierarchies, also in hybrid mode; `None` where one is absent. In the order of [`Tree`].
    Old([Option<PathBuf>; 5]),
    /// The unified one.
    Unified(PathBuf),
}

impl Mounts {
    /// Finds them; the old ones win, because in hybrid mode the unified one has no controllers. Of one that is
    /// mounted several times the shortest path is taken.
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

    /// The tables of files.
    pub fn files(&self) -> &'static [ControlFile] {
        match self {
            Self::Old(_) => OLD,
            Self::Unified(_) => UNIFIED,
        }
    }

    /// Where a file of a group lies; `None` where its hierarchy is not mounted.
    pub fn place(&self, group: &str, file: &ControlFile) -> Option<PathBuf> {
        Some(self.directory(group, file.tree)?.join(file.name))
    }

    /// The directories of a group that hold settings.
    pub fn directories_of_settings(&self, group: &str) -> Vec<PathBuf> {
        let trees: &[Tree] = match self {
            Self::Unified(_) => &[Tree::Cpu],
            Self::Old(_) => &[Tree::Cpu, Tree::Memory, Tree::Pids],
        };
        trees.iter().filter_map(|tree| self.directory(group, *tree)).filter(|directory| directory.is_dir()).collect()
    }

    /// A group's directory.
    pub fn directory(&self, group: &str, tree: Tree) -> Option<PathBuf> {
        let root: &Path = match self {
            Self::Unified(root) => root,
            Self::Old(trees) => trees.get(tree as usize)?.as_deref()?,
        };
        Some(root.join(group.trim_start_matches('/')))
    }

    /// Whether this is the unified hierarchy.
    pub fn is_unified(&self) -> bool {
        matches!(self, Self::Unified(_))
    }
}

/// What stands in a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// `cpu.stat` of the unified hierarchy.
    CpuStat,
    /// `cpuacct.usage`.
    CpuUsage,
    /// `cpuacct.stat`.
    CpuSplit,
    /// `cpu.stat` of the old hierarchy.
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
    /// Memory in use.
    MemoryUsage,
    /// `memory.stat` of the unified hierarchy.
    MemoryStat,
    /// `memory.stat` of the old hierarchy.
    OldMemoryStat,
    /// Limit of memory.
    MemoryLimit,
    /// `memory.swap.current`.
    SwapUsage,
    /// `memory.swap.max`.
    SwapLimit,
    /// `memory.memsw.limit_in_bytes`.
    MemoryAndSwapLimit,
    /// `memory.min`, `memory.soft_limit_in_bytes`.
    MemoryReserved,
    /// The most memory that was in use.
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

impl Content {
    /// Whether it moves with whatever runs in the group.
    pub fn is_clock(self) -> bool {
        matches!(self, Self::CpuStat | Self::CpuUsage | Self::MemoryUsage)
    }

    /// Whether it moves though nothing runs in the group: while something waits, and when the kernel writes back
    /// later what was written before.
    pub fn changes_alone(self) -> bool {
        let is_pressure = matches!(self, Self::CpuPressure | Self::MemoryPressure | Self::IoPressure);
        is_pressure || matches!(self, Self::IoStat | Self::BlkioBytes | Self::BlkioCounts)
    }
}

/// A file of a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ControlFile {
    /// Its hierarchy among the old ones.
    pub tree: Tree,
    /// Its name.
    pub name: &'static str,
    /// What stands in it.
    pub content: Content,
    /// Which looks need it.
    pub depth: Depth,
    /// Whether it changes only when somebody writes it.
    pub is_setting: bool,
}

const fn file(depth: Depth, tree: Tree, name: &'static str, content: Content) -> ControlFile {
    ControlFile { tree, name, content, depth, is_setting: false }
}

const fn setting(depth: Depth, tree: Tree, name: &'static str, content: Content) -> ControlFile {
    ControlFile { tree, name, content, depth, is_setting: true }
}

const UNIFIED: &[ControlFile] = &[
    file(Depth::Core, Tree::Cpu, "cpu.stat", Content::CpuStat),
    file(Depth::Core, Tree::Memory, "memory.current", Content::MemoryUsage),
    file(Depth::Core, Tree::Memory, "memory.stat", Content::MemoryStat),
    file(Depth::Core, Tree::Memory, "memory.swap.current", Content::SwapUsage),
    setting(Depth::Core, Tree::Memory, "memory.max", Content::MemoryLimit),
    setting(Depth::Core, Tree::Memory, "memory.swap.max", Content::SwapLimit),
    file(Depth::Summary, Tree::Cpu, "cpu.pressure", Content::CpuPressure),
    file(Depth::Summary, Tree::Memory, "memory.pressure", Content::MemoryPressure),
    file(Depth::Summary, Tree::Blkio, "io.pressure", Content::IoPressure),
    file(Depth::Summary, Tree::Pids, "cgroup.procs", Content::Processes),
    setting(Depth::Full, Tree::Cpu, "cpu.max", Content::CpuMax),
    setting(Depth::Full, Tree::Cpu, "cpu.weight", Content::CpuWeight),
    setting(Depth::Full, Tree::Memory, "memory.min", Content::MemoryReserved),
    file(Depth::Full, Tree::Memory, "memory.peak", Content::MemoryPeak),
    file(Depth::Full, Tree::Memory, "memory.events", Content::MemoryEvents),
    file(Depth::Full, Tree::Pids, "pids.current", Content::Threads),
    setting(Depth::Full, Tree::Pids, "pids.max", Content::ThreadsMax),
    file(Depth::Full, Tree::Blkio, "io.stat", Content::IoStat),
];

const OLD: &[ControlFile] = &[
    file(Depth::Core, Tree::Cpuacct, "cpuacct.usage", Content::CpuUsage),
    file(Depth::Core, Tree::Memory, "memory.usage_in_bytes", Content::MemoryUsage),
    file(Depth::Core, Tree::Memory, "memory.stat", Content::OldMemoryStat),
    setting(Depth::Core, Tree::Memory, "memory.limit_in_bytes", Content::MemoryLimit),
    setting(Depth::Core, Tree::Memory, "memory.memsw.limit_in_bytes", Content::MemoryAndSwapLimit),
    file(Depth::Summary, Tree::Pids, "cgroup.procs", Content::Processes),
    file(Depth::Full, Tree::Cpuacct, "cpuacct.stat", Content::CpuSplit),
    setting(Depth::Full, Tree::Cpu, "cpu.shares", Content::CpuShares),
    setting(Depth::Full, Tree::Cpu, "cpu.cfs_quota_us", Content::CpuQuota),
    // Only of groups that have a quota.
    file(Depth::Full, Tree::Cpu, "cpu.stat", Content::Throttling),
    setting(Depth::Full, Tree::Cpu, "cpu.cfs_period_us", Content::CpuPeriod),
    setting(Depth::Full, Tree::Memory, "memory.soft_limit_in_bytes", Content::MemoryReserved),
    file(Depth::Full, Tree::Memory, "memory.max_usage_in_bytes", Content::MemoryPeak),
    file(Depth::Full, Tree::Memory, "memory.oom_control", Content::MemoryEvents),
    file(Depth::Full, Tree::Memory, "memory.failcnt", Content::MemoryFailures),
    file(Depth::Full, Tree::Memory, "memory.kmem.usage_in_bytes", Content::MemoryKernel),
    file(Depth::Full, Tree::Pids, "pids.current", Content::Threads),
    setting(Depth::Full, Tree::Pids, "pids.max", Content::ThreadsMax),
    file(Depth::Full, Tree::Blkio, "blkio.throttle.io_service_bytes_recursive", Content::BlkioBytes),
    file(Depth::Full, Tree::Blkio, "blkio.throttle.io_serviced_recursive", Content::BlkioCounts),
];

/// Where the group of a container or sandbox may be below its pod's, by the driver and the runtime that made it: containerd,
/// CRI-O, our own.
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
