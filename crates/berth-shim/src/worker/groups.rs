//! Signals to all processes of a control group, on both kinds of hierarchies.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

use rustix::process::{Pid, Signal, kill_process};

/// Rounds of killing where the kernel cannot kill a whole group at once: processes may fork meanwhile.
const ROUNDS: u32 = 8;
/// Groups below a group that are looked at: deeper is somebody's trick.
const DEEPEST: u32 = 16;

/// Puts this process into groups.
///
/// # Errors
/// The first that refuses.
pub fn enter(groups: &[PathBuf]) -> io::Result<()> {
    groups.iter().try_for_each(|group| write(&group.join("cgroup.procs"), "0"))
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    let written = OpenOptions::new().write(true).open(path).and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|e| io::Error::new(e.kind(), format!("write to {}: {e}", path.display())))
}

/// Kills everything in groups and below. What forks faster than it is killed survives on the old hierarchies; whoever
/// removes the group kills again.
pub fn kill(groups: &[PathBuf]) {
    thaw(groups);
    for group in groups {
        if write(&group.join("cgroup.kill"), "1").is_ok() {
            return; // the unified hierarchy holds all of them
        }
    }
    kill_each(groups);
}

/// As [`kill`], process by process, for groups in which something is started again: the kernel (seen on 6.18) kills
/// whoever is born in a group that `cgroup.kill` was written to once.
pub fn kill_each(groups: &[PathBuf]) {
    thaw(groups);
    // One of the hierarchies suffices: all hold the same processes.
    let Some(group) = groups.first() else { return };
    for _ in 0..ROUNDS {
        if signal_all(group, Signal::KILL, DEEPEST) == 0 {
            return;
        }
    }
}

/// The dead of a frozen group of an old hierarchy do not die until it is thawed.
pub fn thaw(groups: &[PathBuf]) {
    if let Some(file) = groups.iter().map(|group| group.join("freezer.state")).find(|file| file.exists()) {
        let _ = write(&file, "THAWED"); // the group may have gone
    }
}

/// Sends a signal to everything in groups and below.
pub fn signal(groups: &[PathBuf], signal: Signal) {
    if let Some(group) = groups.first() {
        signal_all(group, signal, DEEPEST);
    }
}

/// Signals the processes of a group and below; returns how many there were.
fn signal_all(group: &Path, signal: Signal, depth: u32) -> usize {
    let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default(); // the group has gone: so have they
    let own = rustix::process::getpid();
    let pids = text.lines().filter_map(|line| line.parse().ok().and_then(Pid::from_raw));
    let count = pids.filter(|pid| *pid != own && *pid != Pid::INIT && kill_process(*pid, signal).is_ok()).count();
    let below = fs::read_dir(group).into_iter().flatten().flatten();
    let folders = below.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let deeper = |depth| folders.map(|entry| signal_all(&entry.path(), signal, depth)).sum::<usize>();
    count + depth.checked_sub(1).map_or(0, deeper)
}
