//! Event loop of the shim: one thread that polls all descriptors and never blocks on one.
//!
//! ```text
//!  agent ──requests──► requests ──► starts ──► launcher (namespaces, mounts, execve)
//!    ▲                                 │
//!    └──replies, events─ connection    ▼
//!  SIGCHLD ──► reap ──► exits/<id>   container: streams ──► record ──► log file, clients
//! ```
//!
//! The `Worker` owns all state. An iteration collects what each part waits for, polls once, and handles what is ready:
//! the set of descriptors is a function of the state, so nothing is registered or forgotten. Each stream is read once
//! per iteration, which makes them fair. Implements spec 09 §2, 09a §4, §10-§14.

mod backlog;
mod cgroup_signals;
mod child_reaper;
mod client;
mod connection;
mod container;
mod descendants;
mod event_loop;
mod events;
mod exit_rules;
mod input;
pub mod launcher;
mod log;
pub mod log_record;
mod oom_counter;
mod output;
mod requests;
mod shim_log;
mod starts;
mod stdio;

use std::{
    collections::BTreeMap,
    fs, io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::DirBuilderExt,
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use nix::sys::{
    signal::{SigSet, Signal},
    signalfd::{SfdFlags, SignalFd},
};

use rustix::fs::{Mode, OFlags};

use super::{
    exit_record, log_tally,
    plan::{IdMap, Namespace},
    socket,
};
use child_reaper::ChildExit;
use connection::{AgentConnection, RequestOrigin};
use container::ShimContainer;
use events::Events;
use launcher::Launcher;
use starts::Start;

use berth_sys::failpoint;

/// Name of the PID file in the shim's directory.
pub const PID_FILE: &str = "shim.pid";
/// Maximum age of published log statistics.
const PUBLISH_INTERVAL: Duration = Duration::from_secs(1);
/// Bytes per read of a stream.
const CHUNK: usize = 32 << 10;
/// The kernel's OOM killer chooses it last. Spec 09a §2.2.
const OOM_SCORE_ADJ: &str = "-998";

/// State shared by the pod's containers.
#[derive(Debug, Default)]
struct Pod {
    is_made: bool,
    namespaces: Vec<(Namespace, OwnedFd)>,
    init: Option<u32>,
    users: Option<(IdMap, IdMap)>,
}

/// Statistics of written logs, and their copy readable by the agent.
#[derive(Debug, Default)]
struct LogStatistics {
    sum: log_tally::LogTally,
    writer: log_tally::TallyWriter,
    /// When changed statistics are published next.
    publish_at: Option<Instant>,
}

/// State of the shim.
struct Worker<'a> {
    launcher: &'a dyn Launcher,
    folder: PathBuf,
    listener: OwnedFd,
    signals: SignalFd,
    connection: Option<AgentConnection>,
    connections: u64,
    /// Until when no connection is accepted: the shim ran out of descriptors.
    accept_after: Option<Instant>,
    pod: Pod,
    containers: BTreeMap<u32, ShimContainer>,
    starts: BTreeMap<u32, Start>,
    /// OOM kills in containers that are forgotten.
    kills_before: u64,
    last_key: u32,
    events: Events,
    /// Exits of unknown children during a start in progress.
    unclaimed: Vec<(u32, ChildExit)>,
    buffer: Box<[u8]>,
    idle_since: Option<Instant>,
    disconnected_since: Option<Instant>,
    leaving: Option<Instant>,
    tally: LogStatistics,
}

/// Runs the shim of a directory until it is shut down. Its standard input is the control socket.
///
/// # Errors
/// As [`run`].
pub fn run_on_stdin(folder: &Path, launcher: &dyn Launcher) -> io::Result<()> {
    let listener = io::stdin().as_fd().try_clone_to_owned()?;
    // No process started later may find the socket as its standard input.
    let nothing = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdin(&nothing)?;
    run(folder, listener, launcher)
}

/// Runs the shim of a directory until it is shut down. `listener` is the control socket.
///
/// The process must be single-threaded, and must not be a process group leader.
///
/// # Errors
/// If the event loop cannot be set up, or its poll fails.
pub fn run(folder: &Path, listener: OwnedFd, launcher: &dyn Launcher) -> io::Result<()> {
    let signals = detach_process(folder)?;
    let now = Instant::now();
    let mut worker = Worker {
        launcher,
        folder: folder.to_owned(),
        listener,
        signals,
        connection: None,
        connections: 0,
        accept_after: None,
        pod: Pod::default(),
        containers: BTreeMap::new(),
        starts: BTreeMap::new(),
        kills_before: 0,
        last_key: 0,
        events: Events::default(),
        unclaimed: Vec::new(),
        buffer: vec![0; CHUNK].into_boxed_slice(),
        idle_since: Some(now),
        disconnected_since: Some(now),
        leaving: None,
        tally: LogStatistics::default(),
    };
    while !worker.is_done() {
        worker.run_once()?;
    }
    failpoint::reached("shim.done");
    worker.end();
    failpoint::reached("shim.empty");
    // Nobody finds the shim any more; whoever removes the directory removes what is left.
    for name in [socket::NAME, PID_FILE] {
        let _ = fs::remove_file(folder.join(name));
    }
    Ok(())
}

/// Detaches this process from its parent's session and sets up signals.
fn detach_process(folder: &Path) -> io::Result<SignalFd> {
    if let Err(e) = rustix::process::setsid() {
        shim_log::log(&format!("failed to create session: {e}"));
    }
    rustix::process::chdir("/")?;
    rustix::process::umask(Mode::from_raw_mode(0o022));
    SigSet::all().thread_block()?;
    let mut wanted = SigSet::empty();
    wanted.add(Signal::SIGCHLD);
    wanted.add(Signal::SIGTERM);
    let signals = SignalFd::with_flags(&wanted, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
    nix::sys::prctl::set_child_subreaper(true)?;
    // Containers must not inherit the supplementary groups of the process that started the shim.
    if let Err(e) = nix::unistd::setgroups(&[]) {
        shim_log::log(&format!("failed to drop supplementary groups: {e}"));
    }
    if let Err(e) = fs::write("/proc/self/oom_score_adj", OOM_SCORE_ADJ) {
        shim_log::log(&format!("failed to set oom_score_adj: {e}"));
    }
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder.join(exit_record::FOLDER))?;
    fs::write(folder.join(PID_FILE), format!("{}\n", std::process::id()))?;
    failpoint::reached("shim.settled");
    Ok(signals)
}
