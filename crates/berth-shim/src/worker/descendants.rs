//! Descendants of an exec process, including those outside its process group (own session).
//!
//! The kernel lists the children of each thread. A PID counts only while a pidfd shows that the process that the list
//! was read of still lives, so that a process that reuses the PID is left alone. Orphans are found if the process is a
//! subreaper (`keeps_orphans` in `ExecPlan`); otherwise they become the container's.

use std::{collections::BTreeSet, fs, os::fd::OwnedFd};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

/// Maximum number of processes examined, and of children and threads of each: more indicate an attack, and the
/// container's cgroup contains them anyway.
const MOST: usize = 256;
/// Maximum number of child lists read per round: the shim is single-threaded.
const MOST_LISTS: usize = 4096;
/// Rounds of stopping: processes may fork meanwhile.
const ROUNDS: u32 = 8;

/// Kills all living descendants of a process, but not the process itself, which is stopped. It must not have been
/// reaped, and must be killed afterwards.
///
/// All are stopped before any is killed: a parent that observes a child's exit could start the next one, and a process
/// that loses its parent is not found any more.
pub fn kill(pid: u32) {
    let Some(root) = open(pid) else { return };
    let _gone = pidfd_send_signal(&root, Signal::STOP);
    let (mut found, mut stopped) = (Vec::new(), BTreeSet::new());
    for _ in 0..ROUNDS {
        found = descendants(pid);
        let news: Vec<_> = found.iter().filter(|(pid, _)| stopped.insert(*pid)).collect();
        if news.is_empty() {
            break;
        }
        for (_, process) in news {
            let _gone = pidfd_send_signal(process, Signal::STOP);
        }
    }
    for (_, process) in &found {
        let _gone = pidfd_send_signal(process, Signal::KILL);
    }
}

/// Living descendants of a process.
fn descendants(pid: u32) -> Vec<(u32, OwnedFd)> {
    let mut found: Vec<(u32, OwnedFd)> = open(pid).map(|process| (pid, process)).into_iter().collect();
    let (mut at, mut lists) = (0, MOST_LISTS);
    while let Some((parent, process)) = found.get(at) {
        let begun = children(*parent, &mut lists);
        let opened: Vec<_> = begun.into_iter().filter_map(|child| Some((child, open(child)?))).collect();
        // A PID that is still listed now belongs to the process whose pidfd was opened, and is a child of this very
        // parent.
        let still = if opened.is_empty() { Vec::new() } else { children(*parent, &mut lists) };
        if !has_ended(process) {
            let room = MOST.saturating_sub(found.len());
            found.extend(
                opened.into_iter().filter(|(child, process)| still.contains(child) && !has_ended(process)).take(room),
            );
        }
        at += 1;
    }
    found.drain(..found.len().min(1));
    found
}

fn open(pid: u32) -> Option<OwnedFd> {
    pidfd_open(i32::try_from(pid).ok().and_then(Pid::from_raw)?, PidfdFlags::empty()).ok()
}

/// Whether a process has exited; a zombie has.
fn has_ended(process: &OwnedFd) -> bool {
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&at_once)) != Ok(0)
}

/// The first children of the first threads of a process; reduces `lists` by the number of lists read.
fn children(pid: u32, lists: &mut usize) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let threads: Vec<_> = threads.take(MOST.min(*lists)).collect();
    *lists -= threads.len();
    let read = threads.into_iter().filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    let numbers = |list: String| list.split_ascii_whitespace().filter_map(|n| n.parse().ok()).collect::<Vec<u32>>();
    read.flat_map(numbers).take(MOST).collect()
}

#[cfg(test)]
mod tests {
    use std::{
        process::Command,
        time::{Duration, Instant},
    };

    use super::*;

    #[test]
    fn who_has_left_the_group_is_found_and_who_is_no_kin_is_not() {
        let other = Command::new("sleep").arg("600").spawn();
        let mut other = other.expect("the other runs");
        let script = "setsid sh -c 'sleep 600 & sleep 600; true' & sleep 600; true";
        let mut root = Command::new("sh").args(["-c", script]).spawn().expect("the root runs");
        let until = Instant::now() + Duration::from_secs(20);
        let mut found = Vec::new();
        while found.len() < 4 && Instant::now() < until {
            found = descendants(root.id()); // setsid has become the second shell
        }
        kill(root.id());
        for (_, process) in &found {
            let patience = Timespec { tv_sec: 20, tv_nsec: 0 };
            assert_eq!(poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&patience)), Ok(1), "it ends");
        }
        assert!(other.try_wait().expect("ours").is_none(), "it lives on");
        root.kill().and_then(|()| other.kill()).expect("ours");
        root.wait().and_then(|_| other.wait()).expect("ours");
        assert_eq!(found.len(), 4);
        assert!(descendants(root.id()).is_empty(), "of who has gone");
    }

    #[test]
    fn who_starts_the_next_when_a_child_ends_starts_none() {
        let script = "while :; do setsid sleep 600; done";
        let mut root = Command::new("sh").args(["-c", script]).spawn().expect("the root runs");
        let until = Instant::now() + Duration::from_secs(20);
        while descendants(root.id()).is_empty() && Instant::now() < until {
            std::thread::yield_now();
        }
        let children_file = format!("/proc/{0}/task/{0}/children", root.id());
        kill(root.id());
        let left = || {
            let list = fs::read_to_string(&children_file).expect("the root is there");
            list.split_ascii_whitespace().filter_map(|pid| pid.parse().ok().and_then(open)).collect::<Vec<_>>()
        };
        for process in left() {
            let patience = Timespec { tv_sec: 20, tv_nsec: 0 };
            assert_eq!(poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&patience)), Ok(1), "it ends");
        }
        assert_eq!(left().len(), 1, "it is the only one there was, and its parent sees nothing of its end");
        root.kill().expect("ours");
        root.wait().expect("ours");
    }
}
