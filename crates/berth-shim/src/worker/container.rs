//! State of one container in the shim: first process, streams, log, and attached clients.

use std::{
    collections::BTreeMap,
    os::fd::OwnedFd,
    path::PathBuf,
    time::{Duration, Instant},
};

use super::{
    super::plan::{ContainerRecord, Exit, Hooks, PidNamespace, StartedProcess},
    backlog::PATIENCE,
    client::{AttachedClient, MOST_CLIENTS},
    input::{AHEAD, Input},
    log::Log,
    log_record::Tag,
    oom_counter::OomCounter,
    output::{OutputStream, ReadResult},
    shim_log,
    stdio::StreamEnds,
};

/// Maximum time for reading remaining output after the exit: another process may keep the pipe open.
pub const DRAIN: Duration = Duration::from_secs(2);

/// Stream names in the log.
const NAMES: [&[u8; 6]; 2] = [b"stdout", b"stderr"];

/// Lifecycle state of a container.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ContainerState {
    /// The first process runs.
    Running,
    /// The first process has exited; its remaining output is being read.
    Draining {
        /// Exit of the first process.
        exit: Exit,
        /// Deadline of the drain.
        until: Instant,
    },
    /// The container has exited and its output is drained.
    Ended {
        /// Final exit.
        exit: Exit,
        /// Time of the end.
        since: Instant,
    },
}

/// A container of the pod.
#[derive(Debug)]
pub struct ShimContainer {
    /// Container id.
    pub id: String,
    /// Cgroup directories, one per hierarchy.
    pub groups: Vec<PathBuf>,
    /// PID namespace of the container.
    pub processes: PidNamespace,
    /// The first process.
    pub started: StartedProcess,
    /// Lifecycle state.
    pub state: ContainerState,
    /// Whether the shim killed it on request.
    pub is_killed: bool,
    /// OOM kill counter; `None` without a memory cgroup.
    pub memory: Option<OomCounter>,
    /// PIDs of exec processes, by exec id.
    pub execs: BTreeMap<String, u32>,
    /// Descriptor of the pty master, if it has a terminal.
    pub terminal: Option<OwnedFd>,
    /// Log writer.
    pub log: Log,
    /// Standard streams of the first process.
    pub ends: StreamEnds,
    /// Attached clients.
    pub clients: Vec<AttachedClient>,
    /// Third-party (OCI) hooks.
    pub hooks: Option<Box<Hooks>>,
}

impl ShimContainer {
    /// Whether the first process runs.
    pub fn is_running(&self) -> bool {
        self.state == ContainerState::Running
    }

    /// Whether the container has exited and is drained.
    pub fn is_over(&self) -> bool {
        matches!(self.state, ContainerState::Ended { .. })
    }

    /// OOM kills counted so far.
    pub fn kills(&self) -> u64 {
        match self.state {
            ContainerState::Ended { exit, .. } => exit.oom_kills,
            ContainerState::Running | ContainerState::Draining { .. } => {
                self.memory.as_ref().map_or(0, OomCounter::kills)
            }
        }
    }

    /// Record for the agent.
    pub fn record(&self) -> ContainerRecord {
        let exit = match self.state {
            ContainerState::Ended { exit, .. } => Some(exit),
            ContainerState::Running | ContainerState::Draining { .. } => None,
        };
        ContainerRecord { id: self.id.clone(), started: self.started, exit }
    }

    /// Reads once from an output stream, into the log and to the clients.
    pub fn read_output(&mut self, at: usize, buffer: &mut [u8], now: Instant) {
        let Some(place) = self.ends.outputs.get_mut(at) else { return };
        let Some(output) = place else { return };
        let name = NAMES.get(at).copied().unwrap_or(b"stdout");
        let mut complaint = None;
        let (id, log) = (&self.id, &mut self.log);
        let mut write = |tag: Tag, record: &[u8]| complaint = log.write(name, tag, record).or(complaint.take());
        match output.read(buffer) {
            ReadResult::Some(count) => {
                let bytes = buffer.get(..count).unwrap_or_default();
                output.split(bytes, &mut write);
                self.clients.iter_mut().for_each(|client| client.write(at, bytes, now));
            }
            ReadResult::Nothing => {}
            ReadResult::End => {
                if let Some(output) = place.take() {
                    output.finish(&mut write);
                }
            }
        }
        if let Some(error) = complaint {
            shim_log::log(&format!("container {id}: log is incomplete: {error}"));
        }
    }

    /// Whether all output streams are closed.
    pub fn is_drained(&self) -> bool {
        self.ends.outputs.iter().all(Option::is_none)
    }

    /// Releases the resources of a running container.
    pub fn release(&mut self) {
        for (at, place) in self.ends.outputs.iter_mut().enumerate() {
            let name = NAMES.get(at).copied().unwrap_or(b"stdout");
            if let Some(output) = place.take() {
                output.finish(&mut |tag, record| drop(self.log.write(name, tag, record)));
            }
        }
        self.log.close();
        self.ends.input.closed();
        self.terminal = None;
        self.memory = None;
        self.clients.iter_mut().for_each(AttachedClient::close_stdin);
    }

    /// Reads once from a client's input and forwards it to stdin.
    pub fn read_client(&mut self, client: usize) {
        let mut bytes = [0_u8; AHEAD];
        let Some(client) = self.clients.get_mut(client) else { return };
        let Some(stdin) = client.stdin() else { return };
        let count = match rustix::io::read(stdin, &mut bytes) {
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return,
            Ok(count) => count,
            Err(_) => 0,
        };
        if count > 0 {
            self.ends.input.write(bytes.get(..count).unwrap_or_default());
        } else {
            client.close_stdin();
            if self.ends.input.is_once {
                self.ends.input.close();
            }
        }
    }

    /// Adds a client; returns false if there are too many.
    pub fn attach(&mut self, client: AttachedClient) -> bool {
        let has_room = self.clients.len() < MOST_CLIENTS;
        if has_room {
            self.clients.push(client);
        }
        has_room
    }

    /// Drops clients that have closed, are too slow, or are fully served. Indexes of clients change.
    pub fn sweep(&mut self, now: Instant) {
        let input_is_open = self.ends.input.is_open();
        let over = match self.state {
            ContainerState::Ended { since, .. } => Some(since),
            ContainerState::Running | ContainerState::Draining { .. } => None,
        };
        self.clients.retain_mut(|client| {
            if !input_is_open {
                client.close_stdin();
            }
            let is_slow = client.dropped_at().is_some_and(|at| at <= now);
            let is_done = over.is_some_and(|since| client.is_served() || since + PATIENCE <= now);
            !(client.is_gone() || is_slow || is_done)
        });
    }

    /// Next time at which the container needs attention without an event.
    pub fn deadline(&self) -> Option<Instant> {
        let drained = match self.state {
            ContainerState::Running => None,
            ContainerState::Draining { until, .. } => Some(until),
            ContainerState::Ended { since, .. } => (!self.clients.is_empty()).then_some(since + PATIENCE),
        };
        let slow = self.clients.iter().filter_map(AttachedClient::dropped_at).min();
        let memory = self.memory.as_ref().and_then(OomCounter::again);
        [drained, slow, memory].into_iter().flatten().min()
    }
}

impl StreamEnds {
    /// Streams of a container without any.
    pub fn none() -> Self {
        Self { input: Input::new(None, false), outputs: [const { None::<OutputStream> }; 2] }
    }
}
