//! A container as the shim holds it: its first process, its streams, its log and who is attached.

use std::{
    collections::BTreeMap,
    os::fd::OwnedFd,
    path::PathBuf,
    time::{Duration, Instant},
};

use super::{
    super::plan::{Exit, Held, Hooks, Processes, Started},
    backlog::PATIENCE,
    client::{Client, MOST_CLIENTS},
    input::{AHEAD, Input},
    journal,
    log::Log,
    memory::Memory,
    output::{Output, Read},
    record::Tag,
    stdio::Ends,
};

/// What was written before the end is read for at most that long after it: somebody else may hold the pipe.
pub const DRAIN: Duration = Duration::from_secs(2);

/// The streams' names in the log.
const NAMES: [&[u8; 6]; 2] = [b"stdout", b"stderr"];

/// How far a container has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// Its first process runs.
    Running,
    /// That has ended; what it wrote is still read.
    Draining {
        /// How it ended.
        exit: Exit,
        /// Until when.
        until: Instant,
    },
    /// It is over.
    Ended {
        /// How.
        exit: Exit,
        /// Since when.
        since: Instant,
    },
}

/// A container.
#[derive(Debug)]
pub struct Container {
    /// Its id.
    pub id: String,
    /// Its control groups.
    pub groups: Vec<PathBuf>,
    /// Whose processes it sees.
    pub processes: Processes,
    /// Its first process.
    pub started: Started,
    /// How far it has come.
    pub state: State,
    /// Whether we killed it.
    pub is_killed: bool,
    /// Kills for want of memory.
    pub memory: Option<Memory>,
    /// Other processes, by their ids.
    pub execs: BTreeMap<String, u32>,
    /// Its terminal's master.
    pub terminal: Option<OwnedFd>,
    /// Its log.
    pub log: Log,
    /// Its streams.
    pub ends: Ends,
    /// Who is attached.
    pub clients: Vec<Client>,
    /// Programs of others.
    pub hooks: Option<Box<Hooks>>,
}

impl Container {
    /// Whether its first process runs.
    pub fn is_running(&self) -> bool {
        self.state == State::Running
    }

    /// Whether it is over.
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Ended { .. })
    }

    /// Processes that were killed in it for want of memory, as far as was seen.
    pub fn kills(&self) -> u64 {
        match self.state {
            State::Ended { exit, .. } => exit.oom_kills,
            State::Running | State::Draining { .. } => self.memory.as_ref().map_or(0, Memory::kills),
        }
    }

    /// As a daemon is told.
    pub fn held(&self) -> Held {
        let exit = match self.state {
            State::Ended { exit, .. } => Some(exit),
            State::Running | State::Draining { .. } => None,
        };
        Held { id: self.id.clone(), started: self.started, exit }
    }

    /// Reads once from a stream, into the log and to the clients.
    pub fn read_output(&mut self, at: usize, buffer: &mut [u8], now: Instant) {
        let Some(place) = self.ends.outputs.get_mut(at) else { return };
        let Some(output) = place else { return };
        let name = NAMES.get(at).copied().unwrap_or(b"stdout");
        let mut complaint = None;
        let (id, log) = (&self.id, &mut self.log);
        let mut write = |tag: Tag, record: &[u8]| complaint = log.write(name, tag, record).or(complaint.take());
        match output.read(buffer) {
            Read::Some(count) => {
                let bytes = buffer.get(..count).unwrap_or_default();
                output.split(bytes, &mut write);
                self.clients.iter_mut().for_each(|client| client.write(at, bytes, now));
            }
            Read::Nothing => {}
            Read::End => {
                if let Some(output) = place.take() {
                    output.finish(&mut write);
                }
            }
        }
        if let Some(error) = complaint {
            journal::say(&format!("container {id}: its log is incomplete: {error}"));
        }
    }

    /// Whether nothing more will be read from it.
    pub fn is_drained(&self) -> bool {
        self.ends.outputs.iter().all(Option::is_none)
    }

    /// Gives up what it held while it ran.
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
        self.clients.iter_mut().for_each(Client::close_stdin);
    }

    /// Reads once from a client's input.
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

    /// Adds a client; false: there are too many.
    pub fn attach(&mut self, client: Client) -> bool {
        let has_room = self.clients.len() < MOST_CLIENTS;
        if has_room {
            self.clients.push(client);
        }
        has_room
    }

    /// Lets clients go that have gone, are too slow, or were served to the end. Indices of clients change.
    pub fn sweep(&mut self, now: Instant) {
        let input_is_open = self.ends.input.is_open();
        let over = match self.state {
            State::Ended { since, .. } => Some(since),
            State::Running | State::Draining { .. } => None,
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

    /// When something is to be done about it though nothing happens.
    pub fn deadline(&self) -> Option<Instant> {
        let drained = match self.state {
            State::Running => None,
            State::Draining { until, .. } => Some(until),
            State::Ended { since, .. } => (!self.clients.is_empty()).then_some(since + PATIENCE),
        };
        let slow = self.clients.iter().filter_map(Client::dropped_at).min();
        let memory = self.memory.as_ref().and_then(Memory::again);
        [drained, slow, memory].into_iter().flatten().min()
    }
}

impl Ends {
    /// Of a container that has none.
    pub fn none() -> Self {
        Self { input: Input::new(None, false), outputs: [const { None::<Output> }; 2] }
    }
}
