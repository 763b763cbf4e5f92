//! Reads resource usage from the files of a cgroup, v1 and v2. Blocking.
//! Implements spec 04b §7.2.

use super::{CgroupMemory, Depth, Reading, group_files};
use crate::runtime::now_ns;
use berth_cadvisor::{
    PartialReading,
    control_files::{ControlFile, ControlFileKind, Tree, files},
};
use berth_sys::cgroup::{Controller, GroupPath, Hierarchy};

/// Takes one reading of a cgroup; unreadable values are absent, possibly all of them. [`Depth::Summary`] has the values
/// of CRI statistics, [`Depth::Full`] also those of metrics. Does not count processes: see [`processes`].
pub fn read(hierarchy: &Hierarchy, group: &GroupPath, depth: Depth) -> Reading {
    let is_unified = hierarchy.version() == 2;
    let mut draft = PartialReading::new(now_ns());
    // CRI statistics count threads, and no processes.
    let is_wanted = |file: &&ControlFile| match file.content {
        ControlFileKind::Processes => false,
        ControlFileKind::Threads => true,
        _ => file.depth <= depth,
    };
    for file in files(is_unified).iter().filter(is_wanted) {
        let controller = controller(file.tree, is_unified);
        let text = controller.and_then(|controller| hierarchy.read(group, controller, file.name).ok());
        if let Some(text) = text {
            draft.parse_file(file.content, text.as_bytes());
        }
    }
    let memory = draft.memory(is_unified, None).map(|memory| as_cri_reports(memory, is_unified));
    let cpu = draft.cpu();
    let mut reading = draft.finish(cpu, memory, 0, depth);
    reading.share = reading.share.filter(|share| share.period != 0);
    reading
}

/// Process IDs in a cgroup; none if they cannot be read.
pub fn processes(hierarchy: &Hierarchy, group: &GroupPath) -> Vec<u32> {
    let members = [Controller::Pids, Controller::Cpu, Controller::Memory];
    let members = members.into_iter().find_map(|controller| hierarchy.read(group, controller, "cgroup.procs").ok());
    group_files::processes(members.unwrap_or_default().as_bytes()).collect()
}

/// The controller of a file. CRI has no block I/O of cgroup v1.
fn controller(tree: Tree, is_unified: bool) -> Option<Controller> {
    match tree {
        Tree::Cpu => Some(Controller::Cpu),
        Tree::Cpuacct => Some(Controller::Cpuacct),
        Tree::Memory => Some(Controller::Memory),
        Tree::Pids => Some(Controller::Pids),
        // All files of cgroup v2 are in one directory.
        Tree::Blkio => is_unified.then_some(Controller::Cpu),
    }
}

/// Memory usage where CRI reports other values than the page of the kubelet: page faults of descendants too, the limit
/// of swap alone, and on cgroup v2 kernel memory, and a peak that is never below the usage.
fn as_cri_reports(mut memory: CgroupMemory, is_unified: bool) -> CgroupMemory {
    let stat = &mut memory.stat;
    (stat.pgfault, stat.pgmajfault) = (stat.total_pgfault, stat.total_pgmajfault);
    memory.shown_swap_limit = memory.swap_limit.unwrap_or_default();
    if is_unified {
        memory.kernel = memory.stat.kernel;
        memory.peak = memory.peak.max(memory.usage);
    }
    memory
}

#[cfg(test)]
mod tests {
    use super::*;

    /// critest 8
    #[test]
    fn page_faults_are_those_of_the_whole_group() {
        let faults = |stat, is_unified| {
            let stat = as_cri_reports(CgroupMemory { stat, ..CgroupMemory::default() }, is_unified).stat;
            (stat.pgfault, stat.pgmajfault)
        };
        let old = b"pgfault 1\npgmajfault 2\ntotal_pgfault 30\ntotal_pgmajfault 40\n";
        let unified = b"anon 7\npgfault 50\npgmajfault 60\n";
        assert_eq!(faults(group_files::memory_stat_v1(old), false), (30, 40));
        assert_eq!(faults(group_files::memory_stat(unified), true), (50, 60));
    }
}
