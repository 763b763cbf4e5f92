//! The shim's loop: one thread that waits for many descriptors and never for one.
//!
//! ```text
//!  daemon ──requests──► requests ──► starts ──► launcher (namespaces, mounts, execve)
//!    ▲                                  │
//!    └──replies, events── connection    ▼
//!  SIGCHLD ──► reap ──► exits/<id>   container: streams ──► record ──► log file, clients
//! ```
//!
//! The `Worker` owns everything. A turn asks each part what it waits for, polls once, and acts on what is ready: the
//! set of descriptors is a function of the state, so nothing is registered or forgotten. Each stream is read once per
//! turn, which is what makes them fair. Behaviour: spec 09 §2, 09a §4, §10-§14.

mod backlog;
mod client;
mod connection;
mod container;
mod events;
mod groups;
mod input;
mod journal;
mod kin;
pub mod launcher;
mod log;
mod memory;
mod output;
mod reap;
pub mod record;
mod requests;
mod starts;
mod stdio;
mod turn;
mod verdict;

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
use connection::{Connection, Origin};
use container::Container;
use events::Events;
use launcher::Launcher;
use reap::Ended;
use starts::Start;

use berth_sys::step;

/// The file of the shim's number, in its folder.
pub const PID_FILE: &str = "shim.pid";
/// Nothing is asked for that long before code is given back.
const REST: Duration = Duration::from_secs(2);
/// How old what is told of logs may be.
const TELLS_AFTER: Duration = Duration::from_secs(1);
/// Bytes read at once from a stream.
const CHUNK: usize = 32 << 10;
/// The kernel's killer takes it last. Spec 09a §2.2.
const OOM_SCORE_ADJ: &str = "-998";

/// What the pod's containers share.
#[derive(Debug, Default)]
struct Pod {
    is_made: bool,
    namespaces: Vec<(Namespace, OwnedFd)>,
    init: Option<u32>,
    users: Option<(IdMap, IdMap)>,
}

/// What was written to logs, and what of it the daemon can read.
#[derive(Debug, Default)]
struct Tally {
    sum: log_tally::LogTally,
    told: log_tally::Told,
    /// When it is told, where something is new.
    tells_at: Option<Instant>,
}

/// The shim.
struct Worker<'a> {
    launcher: &'a dyn Launcher,
    folder: PathBuf,
    listener: OwnedFd,
    signals: SignalFd,
    connection: Option<Connection>,
    connections: u64,
    /// Until when nobody is accepted: there was no descriptor left.
    deaf_until: Option<Instant>,
    pod: Pod,
    containers: BTreeMap<u32, Container>,
    starts: BTreeMap<u32, Start>,
    /// Kills for want of memory in containers that are not known any more.
    kills_before: u64,
    last_key: u32,
    events: Events,
    /// Ends of children nobody knew while something was being started.
    unclaimed: Vec<(u32, Ended)>,
    buffer: Box<[u8]>,
    idle_since: Option<Instant>,
    alone_since: Option<Instant>,
    leaving: Option<Instant>,
    tally: Tally,
    /// When code that was needed for what was asked is given back.
    trims_at: Option<Instant>,
}

/// Runs the shim of a folder until it is told to end. Its standard input is the control socket.
///
/// # Errors
/// As [`run`].
pub fn run_on_stdin(folder: &Path, launcher: &dyn Launcher) -> io::Result<()> {
    let listener = io::stdin().as_fd().try_clone_to_owned()?;
    // Nothing that is started later may find the socket where input is expected.
    let nothing = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdin(&nothing)?;
    run(folder, listener, launcher)
}

/// Runs the shim of a folder until it is told to end. The listener is the control socket.
///
/// The process must have one thread, and be the leader of no process group.
///
/// # Errors
/// Where not even the loop can begin.
pub fn run(folder: &Path, listener: OwnedFd, launcher: &dyn Launcher) -> io::Result<()> {
    let signals = settle(folder)?;
    let now = Instant::now();
    let mut worker = Worker {
        launcher,
        folder: folder.to_owned(),
        listener,
        signals,
        connection: None,
        connections: 0,
        deaf_until: None,
        pod: Pod::default(),
        containers: BTreeMap::new(),
        starts: BTreeMap::new(),
        kills_before: 0,
        last_key: 0,
        events: Events::default(),
        unclaimed: Vec::new(),
        buffer: vec![0; CHUNK].into_boxed_slice(),
        idle_since: Some(now),
        alone_since: Some(now),
        leaving: None,
        tally: Tally::default(),
        trims_at: Some(now + REST),
    };
    while !worker.is_done() {
        worker.turn()?;
    }
    step::reached("shim.done");
    worker.end();
    step::reached("shim.empty");
    // Nobody finds it any more; who removes the folder removes what is left.
    for name in [socket::NAME, PID_FILE] {
        let _ = fs::remove_file(folder.join(name));
    }
    Ok(())
}

/// Makes this process independent of whoever started it.
fn settle(folder: &Path) -> io::Result<SignalFd> {
    if let Err(e) = rustix::process::setsid() {
        journal::say(&format!("no session of its own: {e}"));
    }
    rustix::process::chdir("/")?;
    rustix::process::umask(Mode::from_raw_mode(0o022));
    SigSet::all().thread_block()?;
    let mut wanted = SigSet::empty();
    wanted.add(Signal::SIGCHLD);
    wanted.add(Signal::SIGTERM);
    let signals = SignalFd::with_flags(&wanted, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
    nix::sys::prctl::set_child_subreaper(true)?;
    // Supplementary groups of whoever started us are no business of any container.
    if let Err(e) = nix::unistd::setgroups(&[]) {
        journal::say(&format!("supplementary groups stay: {e}"));
    }
    if let Err(e) = fs::write("/proc/self/oom_score_adj", OOM_SCORE_ADJ) {
        journal::say(&format!("oom_score_adj stays as it is: {e}"));
    }
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder.join(exit_record::FOLDER))?;
    fs::write(folder.join(PID_FILE), format!("{}\n", std::process::id()))?;
    step::reached("shim.settled");
    Ok(signals)
}
