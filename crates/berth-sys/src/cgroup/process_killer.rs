//! Kills all processes of a cgroup one by one, with retries.

use std::{
    collections::BTreeSet,
    io, thread,
    time::{Duration, Instant},
};

use rustix::{
    io::Errno,
    process::{Pid, Signal, getpid, kill_process},
};

use super::{CgroupError, CgroupResult};
use crate::backoff::Backoff;

/// Maximum time for killed processes to exit.
const LIMIT: Duration = Duration::from_secs(2);
/// Delay after the first round; doubles.
const PAUSE: Duration = Duration::from_millis(5);
/// Maximum delay between rounds.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// Kills every process that `list` returns until it returns none. Processes may fork meanwhile, so each round lists
/// again; on a busy machine killed processes need longer to exit than the five rounds of spec 06a §7 take.
pub(super) fn all(group: &str, list: impl Fn() -> CgroupResult<BTreeSet<i32>>) -> CgroupResult<()> {
    let (began, mut backoff) = (Instant::now(), Backoff::new(PAUSE, LONGEST_PAUSE));
    loop {
        let pids = list()?;
        if pids.is_empty() {
            return Ok(());
        }
        if began.elapsed() > LIMIT {
            return Err(CgroupError::Other(format!(
                "failed to kill all the processes attached to the {group} cgroups : {} still there after {LIMIT:?}",
                pids.len()
            )));
        }
        for pid in pids {
            one(group, pid)?;
        }
        thread::sleep(backoff.next_delay());
    }
}

fn one(group: &str, pid: i32) -> CgroupResult<()> {
    let pid = match Pid::from_raw(pid) {
        // 0 stands for a process of another PID namespace: not ours to kill.
        None => return Ok(()),
        Some(Pid::INIT) => return Err(CgroupError::Other(format!("{group} contains the init process"))),
        Some(pid) if pid == getpid() => return Err(CgroupError::Other(format!("{group} contains this process"))),
        Some(pid) => pid,
    };
    match kill_process(pid, Signal::KILL) {
        Ok(()) | Err(Errno::SRCH) => Ok(()),
        Err(e) => Err(CgroupError::Other(format!("cannot kill process {pid:?} of {group}: {}", io::Error::from(e)))),
    }
}

/// Parses the process ids in `cgroup.procs`.
pub(super) fn parse(text: &str) -> impl Iterator<Item = i32> {
    text.lines().filter_map(|line| line.trim().parse().ok())
}
