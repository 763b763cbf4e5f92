//! Killing what is left in a group.

use std::{collections::BTreeSet, io, thread, time::Duration};

use rustix::{
    io::Errno,
    process::{Pid, Signal, getpid, kill_process},
};

use super::{CgroupError, CgroupResult};

/// Rounds of looking and killing.
const ROUNDS: u32 = 5;
/// Pause after the first; doubles. The dead need a moment to leave.
const PAUSE: Duration = Duration::from_millis(5);

/// Kills every process that `list` shows until it shows none. Processes may fork meanwhile, so
/// each round looks again.
pub(super) fn all(group: &str, list: impl Fn() -> CgroupResult<BTreeSet<i32>>) -> CgroupResult<()> {
    let mut pause = PAUSE;
    for _ in 0..ROUNDS {
        let pids = list()?;
        if pids.is_empty() {
            return Ok(());
        }
        for pid in pids {
            one(group, pid)?;
        }
        thread::sleep(pause);
        pause *= 2;
    }
    let left = list()?;
    if left.is_empty() {
        return Ok(());
    }
    Err(CgroupError::Other(format!(
        "failed to kill all the processes attached to the {group} cgroups : {} still there after {ROUNDS} rounds",
        left.len()
    )))
}

fn one(group: &str, pid: i32) -> CgroupResult<()> {
    let pid = match Pid::from_raw(pid) {
        // 0 stands for a process of another namespace: not ours to kill.
        None => return Ok(()),
        Some(Pid::INIT) => return Err(CgroupError::Other(format!("{group} holds the init process"))),
        Some(pid) if pid == getpid() => return Err(CgroupError::Other(format!("{group} holds this process"))),
        Some(pid) => pid,
    };
    match kill_process(pid, Signal::KILL) {
        Ok(()) | Err(Errno::SRCH) => Ok(()),
        Err(e) => Err(CgroupError::Other(format!("cannot kill process {pid:?} of {group}: {}", io::Error::from(e)))),
    }
}

/// The process ids in the text of a `cgroup.procs`.
pub(super) fn parse(text: &str) -> impl Iterator<Item = i32> {
    text.lines().filter_map(|line| line.trim().parse().ok())
}
