//! Cgroup file system access, v1, v2, and hybrid: create, read, write, kill, and remove cgroups.
//!
//! `resources/values.rs` decides which values are written, [`files`] parses what is read; this module creates, checks,
//! writes, drains, and removes cgroups on the unified hierarchy ([`v2`]) and on the v1 hierarchies ([`v1`], also in
//! hybrid mode). Every call blocks: use the blocking pool.
//! Implements spec 06a §6.

pub mod files;
mod group;
mod process_killer;
#[cfg(feature = "agent")]
pub mod systemd;
pub mod v1;
pub mod v2;

use std::{io, path::PathBuf};

pub use group::GroupPath;

use super::mount_table;

/// A cgroup controller, or the named v1 hierarchy.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Controller {
    /// `cpu`
    Cpu,
    /// `cpuacct`; part of `cpu` on v2.
    Cpuacct,
    /// `cpuset`
    Cpuset,
    /// `memory`
    Memory,
    /// `pids`
    Pids,
    /// `hugetlb`
    Hugetlb,
    /// `name=systemd`; v1 only.
    Systemd,
}

impl Controller {
    const ALL: [Self; 7] =
        [Self::Cpu, Self::Cpuacct, Self::Cpuset, Self::Memory, Self::Pids, Self::Hugetlb, Self::Systemd];

    /// Kernel name of the controller.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cpuacct => "cpuacct",
            Self::Cpuset => "cpuset",
            Self::Memory => "memory",
            Self::Pids => "pids",
            Self::Hugetlb => "hugetlb",
            Self::Systemd => "name=systemd",
        }
    }
}

/// Failed cgroup operation.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// An operation on a file or directory failed.
    #[error("{what} {}: {source}", path.display())]
    File {
        /// Attempted operation: `create`, `read`, `write "100" to`, `remove`.
        what: String,
        /// Affected file or directory.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// A failure without an affected file.
    #[error("{0}")]
    Other(String),
}

impl CgroupError {
    fn file(what: impl Into<String>, path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self::File { what: what.into(), path: path.into(), source }
    }

    /// The kernel's errno, if there is one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::File { source, .. } => source.raw_os_error(),
            Self::Other(_) => None,
        }
    }

    /// Whether the file or directory does not exist or disappeared while it was read.
    pub fn is_missing(&self) -> bool {
        const NODEV: i32 = rustix::io::Errno::NODEV.raw_os_error();
        matches!(self, Self::File { source, .. }
            if source.kind() == io::ErrorKind::NotFound || source.raw_os_error() == Some(NODEV))
    }

    /// Whether the kernel denied permission.
    pub fn is_forbidden(&self) -> bool {
        matches!(self, Self::File { source, .. } if source.kind() == io::ErrorKind::PermissionDenied)
    }
}

/// Result of a cgroup operation.
pub type CgroupResult<T> = Result<T, CgroupError>;

/// Which controllers a cgroup exists in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CgroupPresence {
    /// All required controllers.
    Complete,
    /// These controllers are missing, by name.
    Partial(Vec<String>),
    /// The cgroup does not exist.
    Absent,
}

/// Cgroup hierarchy of this machine.
#[derive(Clone, Debug)]
pub enum Hierarchy {
    /// cgroup v1: one tree per controller.
    V1(v1::Hierarchies),
    /// cgroup v2: the unified tree.
    V2(v2::UnifiedHierarchy),
}

impl Hierarchy {
    /// Detects the hierarchy from the mount table.
    ///
    /// # Errors
    /// If no cgroup file system is mounted, or the mount table cannot be read.
    pub fn detect() -> CgroupResult<Self> {
        let mounts = mount_table::read().map_err(|e| CgroupError::file("read", "/proc/self/mountinfo", e))?;
        if let Some(old) = v1::Hierarchies::from_mounts(&mounts) {
            return Ok(Self::V1(old));
        }
        let unified = mounts.iter().find(|m| m.kind == "cgroup2");
        let unified = unified.ok_or_else(|| CgroupError::Other("no cgroup hierarchy is mounted".to_owned()))?;
        v2::UnifiedHierarchy::at(unified.target.clone()).map(Self::V2)
    }

    /// Cgroup version, 1 or 2.
    pub fn version(&self) -> u8 {
        match self {
            Self::V1(_) => 1,
            Self::V2(_) => 2,
        }
    }

    /// Whether the controller is available on this machine.
    pub fn has(&self, controller: Controller) -> bool {
        match self {
            Self::V1(h) => h.has(controller),
            Self::V2(h) => h.has(controller),
        }
    }

    /// Returns in which controllers the cgroup exists.
    ///
    /// # Errors
    /// If its files cannot be read.
    pub fn presence(&self, group: &GroupPath) -> CgroupResult<CgroupPresence> {
        match self {
            Self::V1(h) => Ok(h.presence(group)),
            Self::V2(h) => h.presence(group),
        }
    }

    /// Creates the cgroup and its ancestors; existing ones are unchanged. Returns the ancestors that had to be
    /// created, topmost first.
    ///
    /// # Errors
    /// The first directory or controller that cannot be created.
    pub fn create(&self, group: &GroupPath) -> CgroupResult<Vec<GroupPath>> {
        match self {
            Self::V1(h) => h.create(group),
            Self::V2(h) => h.create(group),
        }
    }

    /// As [`Self::create`], in every mounted hierarchy, including those without a controller of ours; returns the
    /// cgroup's directories. [`Self::remove`] removes all of them.
    ///
    /// # Errors
    /// The directory that could not be created, and the kernel's error.
    pub fn create_everywhere(&self, group: &GroupPath) -> CgroupResult<Vec<PathBuf>> {
        match self {
            Self::V1(h) => h.create_everywhere(group),
            Self::V2(h) => h.create(group).map(|_| vec![h.directory(group)]),
        }
    }

    /// Directories of a cgroup: one for each hierarchy in which cgroups are created, one on v2.
    pub fn directories(&self, group: &GroupPath) -> Vec<PathBuf> {
        match self {
            Self::V1(h) => h.directories(group),
            Self::V2(h) => vec![h.directory(group)],
        }
    }

    /// Writes one interface file of a cgroup.
    ///
    /// # Errors
    /// The file, the value, and the kernel's error.
    pub fn write(&self, group: &GroupPath, controller: Controller, file: &str, value: &str) -> CgroupResult<()> {
        group::write(&self.file(group, controller, file)?, value)
    }

    /// Reads one interface file of a cgroup, without trailing white space.
    ///
    /// # Errors
    /// The file and the kernel's error.
    pub fn read(&self, group: &GroupPath, controller: Controller, file: &str) -> CgroupResult<String> {
        group::read(&self.file(group, controller, file)?)
    }

    /// Names of the direct child cgroups.
    ///
    /// # Errors
    /// If they cannot be listed; a missing cgroup has no children.
    pub fn children(&self, group: &GroupPath) -> CgroupResult<Vec<String>> {
        match self {
            Self::V1(h) => h.children(group),
            Self::V2(h) => h.children(group),
        }
    }

    /// Processes of the cgroup itself, without those of its descendants; a process of another PID namespace is 0. On
    /// cgroup v1 those of the `devices` hierarchy.
    ///
    /// # Errors
    /// If they cannot be read, or the hierarchy is not mounted.
    pub fn processes(&self, group: &GroupPath) -> CgroupResult<Vec<i32>> {
        let directory = match self {
            Self::V1(h) => h.devices(group)?,
            Self::V2(h) => h.directory(group),
        };
        group::members(&directory)
    }

    /// Moves a process with all its threads into the cgroup, in every mounted hierarchy; creates the cgroup if it is
    /// missing. Hierarchies before the one that fails stay changed.
    ///
    /// # Errors
    /// The cgroup cannot be created, the process no longer exists, or the kernel refuses the move: on cgroup v2, for
    /// one, a cgroup whose children have controllers has no processes of its own.
    pub fn attach(&self, group: &GroupPath, pid: i32) -> CgroupResult<()> {
        if pid < 1 {
            // The kernel takes 0 for the process that writes.
            return Err(CgroupError::Other(format!("invalid process id {pid}")));
        }
        for directory in self.create_everywhere(group)? {
            group::attach(&directory, pid)?;
        }
        Ok(())
    }

    /// Kills all processes of the cgroup and its descendants, and waits until they are gone. Empty is success.
    ///
    /// # Errors
    /// If processes survive.
    pub fn kill(&self, group: &GroupPath) -> CgroupResult<()> {
        if group.is_root() {
            return Err(CgroupError::Other("cannot kill the processes of the root cgroup".to_owned()));
        }
        match self {
            Self::V1(h) => h.kill(group),
            Self::V2(h) => h.kill(group),
        }
    }

    /// Kills all processes of the cgroup and its descendants, and removes it. A missing cgroup is success.
    ///
    /// # Errors
    /// If processes survive or a directory stays busy.
    pub fn remove(&self, group: &GroupPath) -> CgroupResult<()> {
        if group.is_root() {
            return Err(CgroupError::Other("cannot remove the root cgroup".to_owned()));
        }
        match self {
            Self::V1(h) => h.remove(group),
            Self::V2(h) => h.remove(group),
        }
    }

    fn file(&self, group: &GroupPath, controller: Controller, file: &str) -> CgroupResult<PathBuf> {
        if file.contains('/') {
            return Err(CgroupError::Other(format!("invalid cgroup file {file:?}")));
        }
        let directory = match self {
            Self::V1(h) => h.directory(group, controller)?,
            Self::V2(h) => h.directory(group),
        };
        Ok(directory.join(file))
    }
}
