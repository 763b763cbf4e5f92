//! What a process has started, and what that has: processes that have left its group, by a session of their own.
//!
//! The kernel lists the children of each thread. A number is believed only while a handle shows that the process it was
//! read of still lives, so that whoever has the number after it is left alone. Whom its parent has left behind is not
//! found: that is the container's own from then on.

use std::{fs, os::fd::OwnedFd};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

/// Processes that are looked at, and children and threads of each: more are somebody's trick, and the group of the
/// container holds them anyway.
const MOST: usize = 256;
/// Rounds of killing: processes may fork meanwhile.
const ROUNDS: u32 = 4;

/// Kills whatever a process has started that still lives, but not the process itself: who is alive stays a parent, so
/// that its children can be found. It must not have been reaped.
pub fn kill(pid: u32) {
    for _ in 0..ROUNDS {
        let found = descendants(pid);
        if found.iter().filter(|process| pidfd_send_signal(process, Signal::KILL).is_ok()).count() == 0 {
            return;
        }
    }
}

/// The processes below one that have not ended.
fn descendants(pid: u32) -> Vec<OwnedFd> {
    let mut found: Vec<(u32, OwnedFd)> = open(pid).map(|process| (pid, process)).into_iter().collect();
    let mut at = 0;
    while let Some((parent, process)) = found.get(at) {
        let opened: Vec<_> = children(*parent).into_iter().filter_map(|child| Some((child, open(child)?))).collect();
        // Only who is still a child now is the one whose handle was opened, and of this very parent.
        let still = children(*parent);
        if !has_ended(process) {
            let room = MOST.saturating_sub(found.len());
            found.extend(
                opened.into_iter().filter(|(child, process)| still.contains(child) && !has_ended(process)).take(room),
            );
        }
        at += 1;
    }
    found.into_iter().skip(1).map(|(_, process)| process).collect()
}

fn open(pid: u32) -> Option<OwnedFd> {
    pidfd_open(i32::try_from(pid).ok().and_then(Pid::from_raw)?, PidfdFlags::empty()).ok()
}

/// Whether a process has ended; one that nobody has reaped yet has.
fn has_ended(process: &OwnedFd) -> bool {
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&at_once)) != Ok(0)
}

/// The first children of the first threads of a process.
fn children(pid: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = threads.take(MOST).filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    let numbers = |list: String| list.split_ascii_whitespace().filter_map(|n| n.parse().ok()).collect::<Vec<u32>>();
    lists.flat_map(numbers).take(MOST).collect()
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
        for process in &found {
            let patience = Timespec { tv_sec: 20, tv_nsec: 0 };
            assert_eq!(poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&patience)), Ok(1), "it ends");
        }
        assert!(other.try_wait().expect("ours").is_none(), "it lives on");
        root.kill().and_then(|()| other.kill()).expect("ours");
        root.wait().and_then(|_| other.wait()).expect("ours");
        assert_eq!(found.len(), 4);
        assert!(descendants(root.id()).is_empty(), "of who has gone");
    }
}
