//! Open files of the processes of groups: the one expensive reading, so it is taken apart from the
//! others, in the background, and no more often than every half minute. Blocking.
//! Behaviour: spec 04b §11.

use std::{
    collections::HashMap,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    cadvisor_page::OpenFiles,
    cgroup_files,
    mounts::{Mounts, Tree},
    snapshot::Snapshot,
};

/// Descriptors of one group that are told apart; the others count as no sockets.
const MAX_PER_GROUP: u64 = 20_000;
/// Processes of one group that are looked at.
const MAX_PROCESSES: usize = 4096;

/// A group to look into.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Members {
    /// Its path.
    pub path: Arc<str>,
    /// Whether it is a container's: then it has a first process with limits.
    pub of: Of,
}

/// Whose group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Of {
    /// A container's or sandbox's.
    Container,
    /// Another.
    Other,
}

/// The groups whose open files are counted.
pub fn members(snapshot: &Snapshot) -> Vec<Members> {
    let other = |path: &Arc<str>| Members { path: path.clone(), of: Of::Other };
    let container = |path: &Arc<str>| Members { path: path.clone(), of: Of::Container };
    let above = snapshot.root.iter().chain(&snapshot.above).chain(snapshot.system.iter().map(|(_, seen)| seen));
    let mut members: Vec<Members> = above.map(|seen| other(&seen.path)).collect();
    for pod in &snapshot.pods {
        members.extend(pod.group.as_ref().map(|seen| other(&seen.path)));
        members.extend(pod.sandbox.iter().chain(pod.containers.iter().flatten()).map(|seen| container(&seen.path)));
    }
    members
}

/// Counts the open files of groups, by path.
pub fn count(mounts: &Mounts, proc: &Path, groups: &[Members]) -> HashMap<String, OpenFiles> {
    groups.iter().filter_map(|group| Some((group.path.to_string(), of_group(mounts, proc, group)?))).collect()
}

fn of_group(mounts: &Mounts, proc: &Path, group: &Members) -> Option<OpenFiles> {
    let directories = [Tree::Pids, Tree::Cpu, Tree::Memory].into_iter();
    let mut directories = directories.filter_map(|tree| mounts.directory(&group.path, tree));
    let members = directories.find_map(|directory: PathBuf| fs::read(directory.join("cgroup.procs")).ok())?;
    let mut files = OpenFiles::default();
    for (place, pid) in cgroup_files::processes(&members).take(MAX_PROCESSES).enumerate() {
        let process = proc.join(pid.to_string());
        if place == 0 && group.of == Of::Container {
            files.soft_limit = fs::read_to_string(process.join("limits")).ok().and_then(|limits| soft_limit(&limits));
        }
        let _ = of_process(&process, &mut files); // it may have ended meanwhile
    }
    Some(files)
}

fn of_process(process: &Path, files: &mut OpenFiles) -> io::Result<()> {
    for entry in fs::read_dir(process.join("fd"))? {
        files.descriptors = files.descriptors.saturating_add(1);
        if files.descriptors <= MAX_PER_GROUP
            && fs::read_link(entry?.path())
                .is_ok_and(|target| target.as_os_str().as_encoded_bytes().starts_with(b"socket:"))
        {
            files.sockets = files.sockets.saturating_add(1);
        }
    }
    Ok(())
}

/// The soft limit of open files in `/proc/<pid>/limits`; -1 for none.
fn soft_limit(limits: &str) -> Option<i64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(-1),
        number => number.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn limits_are_read() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units\n\
                      Max processes             7                    7                    processes\n\
                      Max open files            1024                 524288               files\n";
        assert_eq!(soft_limit(limits), Some(1024));
        assert_eq!(soft_limit("Max open files  unlimited  unlimited files\n"), Some(-1));
        assert_eq!(soft_limit("Max processes 7 7 processes\n"), None);
    }

    #[test]
    fn our_own_files_are_counted() {
        let root = tempfile::tempdir().expect("a directory");
        fs::write(root.path().join("cgroup.procs"), format!("{}\n", std::process::id())).expect("written");
        let mounts = Mounts::Unified(root.path().to_owned());
        let look = || {
            let group = Members { path: "/".into(), of: Of::Container };
            count(&mounts, Path::new("/proc"), &[group]).remove("/").expect("there")
        };
        let before = look();
        let _pair = UnixStream::pair().expect("sockets");
        let after = look();
        // Other tests open and close files beside this one, but hardly as many as there are.
        assert!(before.descriptors > 0 && after.sockets >= 2 && after.soft_limit.is_some(), "{before:?} {after:?}");
        let absent = Members { path: "/absent".into(), of: Of::Other };
        assert!(count(&mounts, Path::new("/proc"), &[absent]).is_empty());
    }
}
