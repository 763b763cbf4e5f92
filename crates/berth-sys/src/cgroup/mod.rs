//! Control groups as the kernel shows them: directories and small files.
//!
//! What is written into the files is decided elsewhere (`resources/values.rs`), what they say is read
//! by [`files`]; here is how groups are made, checked, written, emptied and removed, on the unified
//! hierarchy ([`v2`]) and on the old ones ([`v1`], also in hybrid mode). Every call blocks: use the
//! blocking pool.
//! Behaviour: spec 06a §6.

pub mod files;
mod group;
mod kill;
pub mod systemd;
pub mod v1;
pub mod v2;

use std::{io, path::PathBuf};

pub use group::GroupPath;

use super::mount_table;

/// A controller, or the hierarchy of that name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Controller {
    /// `cpu`
    Cpu,
    /// `cpuacct`; on the unified hierarchy a part of `cpu`.
    Cpuacct,
    /// `cpuset`
    Cpuset,
    /// `memory`
    Memory,
    /// `pids`
    Pids,
    /// `hugetlb`
    Hugetlb,
    /// `name=systemd`; only on the old hierarchies.
    Systemd,
}

impl Controller {
    const ALL: [Self; 7] =
        [Self::Cpu, Self::Cpuacct, Self::Cpuset, Self::Memory, Self::Pids, Self::Hugetlb, Self::Systemd];

    /// As the kernel spells it.
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

/// What went wrong with which file.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// A file or directory.
    #[error("{what} {}: {source}", path.display())]
    File {
        /// What was tried: `create`, `read`, `write "100" to`, `remove`.
        what: String,
        /// The file or directory.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Something else than a file.
    #[error("{0}")]
    Other(String),
}

impl CgroupError {
    fn file(what: impl Into<String>, path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self::File { what: what.into(), path: path.into(), source }
    }

    /// The kernel's error number, where there is one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::File { source, .. } => source.raw_os_error(),
            Self::Other(_) => None,
        }
    }

    /// Whether the file or directory does not exist, or ceased to while it was read.
    pub fn is_missing(&self) -> bool {
        const NODEV: i32 = rustix::io::Errno::NODEV.raw_os_error();
        matches!(self, Self::File { source, .. }
            if source.kind() == io::ErrorKind::NotFound || source.raw_os_error() == Some(NODEV))
    }

    /// Whether the kernel refused for lack of rights.
    pub fn is_forbidden(&self) -> bool {
        matches!(self, Self::File { source, .. } if source.kind() == io::ErrorKind::PermissionDenied)
    }
}

/// The result of a control group call.
pub type CgroupResult<T> = Result<T, CgroupError>;

/// How much of a group is there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Presence {
    /// With all controllers.
    Complete,
    /// Some controllers are missing, by name.
    Partial(Vec<String>),
    /// Nothing.
    Absent,
}

/// This machine's control groups.
#[derive(Clone, Debug)]
pub enum Hierarchy {
    /// The old ones, one tree per controller.
    V1(v1::Hierarchies),
    /// The unified one.
    V2(v2::Unified),
}

impl Hierarchy {
    /// Looks at what is mounted.
    ///
    /// # Errors
    /// Where no control groups are mounted, or the mounts cannot be read.
    pub fn detect() -> CgroupResult<Self> {
        let mounts = mount_table::read().map_err(|e| CgroupError::file("read", "/proc/self/mountinfo", e))?;
        if let Some(old) = v1::Hierarchies::from_mounts(&mounts) {
            return Ok(Self::V1(old));
        }
        let unified = mounts.iter().find(|m| m.kind == "cgroup2");
        let unified = unified.ok_or_else(|| CgroupError::Other("no control groups are mounted".to_owned()))?;
        v2::Unified::at(unified.target.clone()).map(Self::V2)
    }

    /// 1 or 2.
    pub fn version(&self) -> u8 {
        match self {
            Self::V1(_) => 1,
            Self::V2(_) => 2,
        }
    }

    /// Whether that controller is there at all.
    pub fn has(&self, controller: Controller) -> bool {
        match self {
            Self::V1(h) => h.has(controller),
            Self::V2(h) => h.has(controller),
        }
    }

    /// How much of the group is there.
    ///
    /// # Errors
    /// Where its files cannot be looked at.
    pub fn presence(&self, group: &GroupPath) -> CgroupResult<Presence> {
        match self {
            Self::V1(h) => Ok(h.presence(group)),
            Self::V2(h) => h.presence(group),
        }
    }

    /// Makes the group and those above it; what exists stays. Returns the groups above that had to
    /// be made, topmost first.
    ///
    /// # Errors
    /// The first directory or controller that cannot be made.
    pub fn create(&self, group: &GroupPath) -> CgroupResult<Vec<GroupPath>> {
        match self {
            Self::V1(h) => h.create(group),
            Self::V2(h) => h.create(group),
        }
    }

    /// As [`Self::create`], in every mounted hierarchy, those without a controller of ours included; returns the group's
    /// directories. [`Self::remove`] removes all of them.
    ///
    /// # Errors
    /// What could not be made, and the kernel's answer.
    pub fn create_everywhere(&self, group: &GroupPath) -> CgroupResult<Vec<PathBuf>> {
        match self {
            Self::V1(h) => h.create_everywhere(group),
            Self::V2(h) => h.create(group).map(|_| vec![h.directory(group)]),
        }
    }

    /// A group's directories: one for each hierarchy in which groups are made, one on the unified one.
    pub fn directories(&self, group: &GroupPath) -> Vec<PathBuf> {
        match self {
            Self::V1(h) => h.directories(group),
            Self::V2(h) => vec![h.directory(group)],
        }
    }

    /// Writes one file of a group.
    ///
    /// # Errors
    /// The file, the value and the kernel's answer.
    pub fn write(&self, group: &GroupPath, controller: Controller, file: &str, value: &str) -> CgroupResult<()> {
        group::write(&self.file(group, controller, file)?, value)
    }

    /// Reads one file of a group, without blanks at the end.
    ///
    /// # Errors
    /// The file and the kernel's answer.
    pub fn read(&self, group: &GroupPath, controller: Controller, file: &str) -> CgroupResult<String> {
        group::read(&self.file(group, controller, file)?)
    }

    /// Names of the groups directly below.
    ///
    /// # Errors
    /// Where they cannot be listed; a group that does not exist has none.
    pub fn children(&self, group: &GroupPath) -> CgroupResult<Vec<String>> {
        match self {
            Self::V1(h) => h.children(group),
            Self::V2(h) => h.children(group),
        }
    }

    /// Kills what is in the group and below, and waits until it is gone. Nothing there is success.
    ///
    /// # Errors
    /// Where processes survive.
    pub fn kill(&self, group: &GroupPath) -> CgroupResult<()> {
        if group.is_root() {
            return Err(CgroupError::Other("what runs in the root control group cannot be killed".to_owned()));
        }
        match self {
            Self::V1(h) => h.kill(group),
            Self::V2(h) => h.kill(group),
        }
    }

    /// Kills what is left in the group and below, and removes it. Nothing there is success.
    ///
    /// # Errors
    /// Where processes survive or a directory stays busy.
    pub fn remove(&self, group: &GroupPath) -> CgroupResult<()> {
        if group.is_root() {
            return Err(CgroupError::Other("the root control group cannot be removed".to_owned()));
        }
        match self {
            Self::V1(h) => h.remove(group),
            Self::V2(h) => h.remove(group),
        }
    }

    fn file(&self, group: &GroupPath, controller: Controller, file: &str) -> CgroupResult<PathBuf> {
        if file.contains('/') {
            return Err(CgroupError::Other(format!("{file:?} is not a file of a control group")));
        }
        let directory = match self {
            Self::V1(h) => h.directory(group, controller)?,
            Self::V2(h) => h.directory(group),
        };
        Ok(directory.join(file))
    }
}
