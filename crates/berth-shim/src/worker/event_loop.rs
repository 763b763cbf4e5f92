//! One iteration of the shim's event loop: poll set, deadlines, and dispatch.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Signal, WaitOptions},
};

use super::{
    super::{log_tally::LogTally, socket},
    AgentConnection, PUBLISH_INTERVAL, Worker,
    container::ShimContainer,
    exit_rules,
    oom_counter::OomCounter,
    shim_log,
    starts::Start,
    starts::kill,
};

/// Maximum time for sending the last replies before exit.
const FAREWELL: Duration = Duration::from_secs(1);

/// Delay after a failed accept before the next one.
const DEAF: Duration = Duration::from_secs(1);

/// Source of a ready descriptor. Containers and starts by key, the rest by position.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Token {
    Start(u32),
    Signals,
    Connection,
    Listener,
    Output(u32, usize),
    Input(u32),
    ClientInput(u32, usize),
    ClientSink(u32, usize, usize),
    Memory(u32),
}

impl Worker<'_> {
    /// Waits for events, and handles them.
    pub(super) fn run_once(&mut self) -> io::Result<()> {
        let ready = self.wait()?;
        let now = Instant::now();
        // Positions stay valid: nothing is removed before `run_deadlines`.
        for (token, flags) in ready {
            self.act(token, flags, now)?;
        }
        self.run_deadlines(now);
        Ok(())
    }

    fn wait(&self) -> io::Result<Vec<(Token, PollFlags)>> {
        let mut tokens = Vec::new();
        let mut fds = Vec::new();
        self.interests(&mut |token, fd, flags| {
            tokens.push(token);
            fds.push(PollFd::from_borrowed_fd(fd, flags));
        });
        let timeout = self.deadline().map(|at| at.saturating_duration_since(Instant::now()));
        // One millisecond more: the deadline must have passed when it is checked.
        let timeout = timeout.and_then(|t| Timespec::try_from(t + Duration::from_millis(1)).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        let flags = fds.iter().map(PollFd::revents);
        Ok(tokens.into_iter().zip(flags).filter(|(_, flags)| !flags.is_empty()).collect())
    }

    /// Adds all descriptors to poll.
    fn interests<'a>(&'a self, add: &mut dyn FnMut(Token, BorrowedFd<'a>, PollFlags)) {
        for (key, start) in &self.starts {
            if let Some(launching) = &start.launching {
                add(Token::Start(*key), launching.report(), PollFlags::IN);
            }
        }
        add(Token::Signals, self.signals.as_fd(), PollFlags::IN);
        if let Some(connection) = &self.connection {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, connection.reads());
            flags.set(PollFlags::OUT, connection.is_blocked());
            add(Token::Connection, connection.fd(), flags);
        }
        if self.accept_after.is_none() {
            add(Token::Listener, self.listener.as_fd(), PollFlags::IN);
        }
        for (key, container) in &self.containers {
            container_interests(*key, container, add);
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let starts = self.starts.values().map(Start::until);
        let containers = self.containers.values().filter_map(ShimContainer::deadline);
        let leaves = self.leaving.map(|at| at + FAREWELL);
        let goes = exit_rules::idle_exit_at(self.idle_since, self.disconnected_since);
        let own = [leaves, goes, self.accept_after, self.tally.publish_at];
        starts.chain(containers).chain(own.into_iter().flatten()).min()
    }

    fn act(&mut self, token: Token, flags: PollFlags, now: Instant) -> io::Result<()> {
        match token {
            Token::Start(key) => self.advance_start(key, now),
            Token::Signals => self.signalled(now)?,
            Token::Connection => {
                // The end of the stream is read after the last request.
                if flags.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
                    self.receive_request(now);
                }
            }
            Token::Listener => self.accept(now),
            Token::Output(key, at) => {
                if let Some(container) = self.containers.get_mut(&key) {
                    container.read_output(at, &mut self.buffer, now);
                }
            }
            Token::Input(key) => {
                if let Some(container) = self.containers.get_mut(&key) {
                    match flags.contains(PollFlags::OUT) {
                        true => container.ends.input.flush(),
                        false => container.ends.input.closed(),
                    }
                }
            }
            Token::ClientInput(key, client) => {
                if let Some(container) = self.containers.get_mut(&key) {
                    container.read_client(client);
                }
            }
            Token::ClientSink(key, client, at) => {
                let client = self.containers.get_mut(&key).and_then(|container| container.clients.get_mut(client));
                match client {
                    Some(client) if flags.intersects(PollFlags::ERR | PollFlags::HUP) => client.closed(at),
                    Some(client) => client.flush(at),
                    None => {}
                }
            }
            Token::Memory(key) => {
                let memory = self.containers.get_mut(&key).and_then(|container| container.memory.as_mut());
                if let Some(memory) = memory {
                    memory.read_count(now);
                }
            }
        }
        Ok(())
    }

    fn signalled(&mut self, now: Instant) -> io::Result<()> {
        let mut is_child = false;
        while let Some(signal) = self.signals.read_signal()? {
            match i32::try_from(signal.ssi_signo) {
                Ok(nix::libc::SIGTERM) if self.is_empty() => self.leaving = Some(now),
                Ok(nix::libc::SIGTERM) => shim_log::log("ignored SIGTERM: containers are running"),
                _ => is_child = true,
            }
        }
        if is_child {
            self.reap(now);
        }
        Ok(())
    }

    /// Accepts a connection; a new agent replaces the previous one.
    fn accept(&mut self, now: Instant) {
        match socket::accept(self.listener.as_fd()) {
            Ok(Some(fd)) => {
                self.connections += 1;
                self.connection = Some(AgentConnection::new(fd, self.connections));
                self.events.reset_sent();
                self.disconnected_since = None;
            }
            Ok(None) => {}
            Err(e) => {
                shim_log::log(&format!("accept connection: {e}"));
                self.accept_after = Some(now + DEAF);
            }
        }
    }

    /// Handles deadlines and follow-up work of the iteration.
    fn run_deadlines(&mut self, now: Instant) {
        if self.starts.values().any(|start| start.until() <= now) {
            self.advance_starts(now);
        }
        for container in self.containers.values_mut() {
            if container.memory.as_ref().and_then(OomCounter::again).is_some_and(|at| at <= now) {
                container.memory.iter_mut().for_each(|memory| memory.read_count(now));
            }
        }
        self.finish_drained(now);
        self.containers.values_mut().for_each(|container| container.sweep(now));
        self.tally(now);
        let flushed = self.connection.as_mut().map(|connection| connection.flush(&mut self.events));
        if let Some(Err(_)) = flushed {
            self.close_connection(now);
        }
        self.accept_after = self.accept_after.filter(|until| *until > now);
        self.idle_since = if self.is_empty() { self.idle_since.or(Some(now)) } else { None };
    }

    /// Publishes log statistics at a limited rate: nobody reads them more often.
    fn tally(&mut self, now: Instant) {
        let news = self.containers.values_mut().map(|container| container.log.news());
        let news = news.fold(LogTally::default(), LogTally::plus);
        if news != LogTally::default() {
            self.tally.sum = self.tally.sum.plus(news);
            self.tally.publish_at.get_or_insert(now + PUBLISH_INTERVAL);
        }
        let is_over = self.containers.values().all(ShimContainer::is_over);
        if self.tally.publish_at.is_some_and(|at| at <= now || is_over) {
            self.tally.publish_at = None;
            if let Err(e) = self.tally.writer.publish(&self.folder, self.tally.sum) {
                shim_log::log(&format!("failed to publish log statistics: {e}"));
            }
        }
    }

    /// An unused key.
    pub(super) fn next_key(&mut self) -> u32 {
        self.last_key = self.last_key.wrapping_add(1);
        while self.containers.contains_key(&self.last_key) || self.starts.contains_key(&self.last_key) {
            self.last_key = self.last_key.wrapping_add(1);
        }
        self.last_key
    }

    /// Whether the shim is to exit.
    pub(super) fn is_done(&self) -> bool {
        let now = Instant::now();
        if exit_rules::idle_exit_at(self.idle_since, self.disconnected_since).is_some_and(|at| at <= now) {
            return true;
        }
        let is_flushed = self.connection.as_ref().is_none_or(AgentConnection::is_flushed);
        self.leaving.is_some_and(|since| is_flushed || since + FAREWELL <= now)
    }

    /// Kills the pod's process 1, and waits for it: its exit terminates everything in its PID namespace.
    pub(super) fn end(&mut self) {
        let Some(init) = self.pod.init.take() else { return };
        kill(init, Signal::KILL);
        let pid = i32::try_from(init).ok().and_then(rustix::process::Pid::from_raw);
        let until = Instant::now() + FAREWELL;
        let ends = |pid| matches!(rustix::process::waitpid(Some(pid), WaitOptions::NOHANG), Ok(None));
        while pid.is_some_and(ends) && Instant::now() < until {
            let mut fds = [PollFd::from_borrowed_fd(self.signals.as_fd(), PollFlags::IN)];
            let pause = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
            let _ = poll(&mut fds, Some(&pause));
            let _ = self.signals.read_signal();
        }
    }
}

/// Adds the descriptors of a container to poll.
fn container_interests<'a>(
    key: u32,
    container: &'a ShimContainer,
    add: &mut dyn FnMut(Token, BorrowedFd<'a>, PollFlags),
) {
    for (at, output) in container.ends.outputs.iter().enumerate() {
        if let Some(output) = output {
            add(Token::Output(key, at), output.fd(), PollFlags::IN);
        }
    }
    if let Some((fd, waits)) = container.ends.input.waits() {
        // The hangup of a pty is noticed by reading it.
        if waits || container.terminal.is_none() {
            add(Token::Input(key), fd, if waits { PollFlags::OUT } else { PollFlags::empty() });
        }
    }
    for (index, client) in container.clients.iter().enumerate() {
        if let (Some(fd), true) = (client.stdin(), container.ends.input.has_room()) {
            add(Token::ClientInput(key, index), fd, PollFlags::IN);
        }
        for (at, fd, waits) in client.sinks() {
            add(Token::ClientSink(key, index, at), fd, if waits { PollFlags::OUT } else { PollFlags::empty() });
        }
    }
    if let Some(fd) = container.memory.as_ref().and_then(OomCounter::fd) {
        add(Token::Memory(key), fd, PollFlags::IN);
    }
}
