//! Counts the open files of the processes in cgroups.
//!
//! This is the one expensive reading, so it runs apart from the others, in the background, and at most every half
//! minute. Blocks. Implements spec 04b §11.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    cadvisor_page::{Counts, OpenFileCount},
    cgroup_files,
    mounts::{Mounts, Tree},
    reader::CgroupObservation,
    snapshot::Snapshot,
};
use berth_sys::open_files;
pub use berth_sys::open_files::OpenFiles;

/// Maximum number of processes counted per cgroup.
const MAX_PROCESSES: usize = 4096;

/// A cgroup whose open files are counted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CgroupProcesses {
    /// Path of the cgroup.
    pub path: Arc<str>,
    /// Owner of the cgroup; the first process of a container has the limits that are reported.
    pub of: CgroupOwner,
    /// CPU time used, nanoseconds; `None` where unknown.
    pub used_ns: Option<u64>,
}

/// Whether a cgroup belongs to a container: only then its open-file limit is reported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CgroupOwner {
    /// A container or sandbox.
    Container,
    /// Any other owner.
    Other,
}

/// Returns the cgroups whose open files are counted.
pub fn members(snapshot: &Snapshot) -> Vec<CgroupProcesses> {
    let members = |seen: &CgroupObservation, of| {
        let used_ns = seen.reading.cpu.map(|cpu| cpu.times.usage_ns);
        CgroupProcesses { path: seen.path.clone(), of, used_ns }
    };
    let (other, container) = (
        |seen: &CgroupObservation| members(seen, CgroupOwner::Other),
        |seen: &CgroupObservation| members(seen, CgroupOwner::Container),
    );
    let above =
        snapshot.root.iter().chain(&snapshot.parent_cgroups).chain(snapshot.system.iter().map(|(_, seen)| seen));
    let mut members: Vec<CgroupProcesses> = above.map(other).collect();
    for pod in &snapshot.pods {
        members.extend(pod.group.as_ref().map(other));
        members.extend(pod.sandbox.iter().chain(pod.containers.iter().flatten()).map(container));
    }
    members
}

/// Counts the open files of cgroups. A cgroup that used no CPU since its last count has opened and closed nothing, so
/// its count is reused.
pub fn count(mounts: &Mounts, proc: &Path, groups: &[CgroupProcesses], before: &Counts) -> Counts {
    let count = |group: &CgroupProcesses| {
        let known = before.get(&group.path).filter(|known| known.used_ns.is_some() && known.used_ns == group.used_ns);
        let files = known.map(|known| known.files).or_else(|| of_group(mounts, proc, group))?;
        Some((group.path.clone(), OpenFileCount { files, used_ns: group.used_ns }))
    };
    groups.iter().filter_map(count).collect()
}

fn of_group(mounts: &Mounts, proc: &Path, group: &CgroupProcesses) -> Option<OpenFiles> {
    let directories = [Tree::Pids, Tree::Cpu, Tree::Memory].into_iter();
    let mut directories = directories.filter_map(|tree| mounts.directory(&group.path, tree));
    let members = directories.find_map(|directory: PathBuf| fs::read(directory.join("cgroup.procs")).ok())?;
    let mut files = open_files::count(proc, cgroup_files::processes(&members).take(MAX_PROCESSES));
    if group.of != CgroupOwner::Container {
        files.soft_limit = None;
    }
    Some(files)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn our_own_files_are_counted() {
        let root = tempfile::tempdir().expect("a directory");
        fs::write(root.path().join("cgroup.procs"), format!("{}\n", std::process::id())).expect("written");
        let mounts = Mounts::Unified(root.path().to_owned());
        let count_files = |used_ns, before: &Counts| {
            let group = CgroupProcesses { path: "/".into(), of: CgroupOwner::Container, used_ns };
            count(&mounts, Path::new("/proc"), &[group], before)
        };
        let files = |counts: &Counts| counts.get("/").expect("there").files;
        let first = count_files(Some(1), &Counts::new());
        let _pair = UnixStream::pair().expect("sockets");
        let (idle, busy, unknown) =
            (count_files(Some(1), &first), count_files(Some(2), &first), count_files(None, &count_files(None, &first)));
        assert_eq!(idle, first, "idle cgroups are not scanned");
        assert!(files(&unknown).sockets >= 2);
        let (before, after) = (files(&first), files(&busy));
        // Other tests open and close files beside this one, but hardly as many as there are.
        assert!(before.descriptors > 0 && after.sockets >= 2 && after.soft_limit.is_some(), "{before:?} {after:?}");
        let absent = CgroupProcesses { path: "/absent".into(), of: CgroupOwner::Other, used_ns: None };
        assert!(count(&mounts, Path::new("/proc"), &[absent], &Counts::new()).is_empty());
    }
}
