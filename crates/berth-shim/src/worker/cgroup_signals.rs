//! Signals to all processes of a cgroup, on cgroup v1 and v2.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

use rustix::process::{Pid, Signal, kill_process};

/// Rounds of killing if the kernel cannot kill a whole cgroup at once: processes may fork meanwhile.
const ROUNDS: u32 = 8;
/// Maximum depth of descendant cgroups: deeper nesting indicates an attack.
const DEEPEST: u32 = 16;

/// Moves this process into cgroups.
///
/// # Errors
/// The first cgroup that refuses.
pub fn enter(groups: &[PathBuf]) -> io::Result<()> {
    groups.iter().try_for_each(|group| write(&group.join("cgroup.procs"), "0"))
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    let written = OpenOptions::new().write(true).open(path).and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|e| io::Error::new(e.kind(), format!("write to {}: {e}", path.display())))
}

/// Kills all processes in cgroups and their descendants. On cgroup v1, processes that fork faster than they are killed
/// survive; the removal of the cgroup kills again.
pub fn kill(groups: &[PathBuf]) {
    thaw(groups);
    for group in groups {
        if write(&group.join("cgroup.kill"), "1").is_ok() {
            return; // the unified hierarchy contains all of them
        }
    }
    kill_each(groups);
}

/// As [`kill`], process by process, for cgroups in which a process is started again: the kernel (observed on 6.18)
/// kills every process created in a cgroup that `cgroup.kill` was written to once.
pub fn kill_each(groups: &[PathBuf]) {
    thaw(groups);
    // One of the hierarchies suffices: all contain the same processes.
    let Some(group) = groups.first() else { return };
    for _ in 0..ROUNDS {
        if signal_all(group, Signal::KILL, DEEPEST) == 0 {
            return;
        }
    }
}

/// Thaws a frozen v1 cgroup: its killed processes exit only afterwards.
pub fn thaw(groups: &[PathBuf]) {
    if let Some(file) = groups.iter().map(|group| group.join("freezer.state")).find(|file| file.exists()) {
        let _ = write(&file, "THAWED"); // the cgroup may be gone
    }
}

/// Sends a signal to all processes in cgroups and their descendants.
pub fn signal(groups: &[PathBuf], signal: Signal) {
    if let Some(group) = groups.first() {
        signal_all(group, signal, DEEPEST);
    }
}

/// Signals the processes of a cgroup and its descendants; returns the number of signaled processes.
fn signal_all(group: &Path, signal: Signal, depth: u32) -> usize {
    let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default(); // cgroup gone: no processes
    let own = rustix::process::getpid();
    let pids = text.lines().filter_map(|line| line.parse().ok().and_then(Pid::from_raw));
    let count = pids.filter(|pid| *pid != own && *pid != Pid::INIT && kill_process(*pid, signal).is_ok()).count();
    let below = fs::read_dir(group).into_iter().flatten().flatten();
    let folders = below.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let deeper = |depth| folders.map(|entry| signal_all(&entry.path(), signal, depth)).sum::<usize>();
    count + depth.checked_sub(1).map_or(0, deeper)
}
