//! What a process has started, and what that has: processes that have left its group, by a session of their own.
//!
//! The kernel lists the children of each thread. A number is believed only while a handle shows that the process it was
//! read of still lives, so that whoever has the number after it is left alone. Whom its parent has left behind is found
//! where the process keeps orphans (`ExecPlan`); otherwise that is the container's own from then on.

use std::{collections::BTreeSet, fs, os::fd::OwnedFd};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

/// Processes that are looked at, and children and threads of each: more are somebody's trick, and the group of the
/// container holds them anyway.
const MOST: usize = 256;
/// Lists of children that are read in a round: the shim has but one thread.
const MOST_LISTS: usize = 4096;
/// Rounds of stopping: processes may fork meanwhile.
const ROUNDS: u32 = 8;

/// Kills whatever a process has started that still lives, but not the process itself, which is stopped. It must not have
/// been reaped, and is to be killed afterwards.
///
/// All are stopped before any is killed: who sees the end of a child could start the next, and who loses its parent is
/// not found any more.
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

/// The processes below one that have not ended.
fn descendants(pid: u32) -> Vec<(u32, OwnedFd)> {
    let mut found: Vec<(u32, OwnedFd)> = open(pid).map(|process| (pid, process)).into_iter().collect();
    let (mut at, mut lists) = (0, MOST_LISTS);
    while let Some((parent, process)) = found.get(at) {
        let begun = children(*parent, &mut lists);
        let opened: Vec<_> = begun.into_iter().filter_map(|child| Some((child, open(child)?))).collect();
        // Only who is still a child now is the one whose handle was opened, and of this very parent.
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

/// Whether a process has ended; one that nobody has reaped yet has.
fn has_ended(process: &OwnedFd) -> bool {
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&at_once)) != Ok(0)
}

/// The first children of the first threads of a process; each list is taken from those that may be read.
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
