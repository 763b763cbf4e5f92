//! Client attached to a container: receives its further output, and may write to its stdin.
//!
//! A container never waits for a client: output that a client does not read is buffered up to a limit, and then dropped
//! for that client. Implements spec 09a §4.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Instant,
};

use rustix::io::Errno;

use super::backlog::{Backlog, MOST};

/// Maximum number of clients per container.
pub const MOST_CLIENTS: usize = 16;

/// Output descriptor with its backlog.
#[derive(Debug)]
struct Sink {
    fd: OwnedFd,
    backlog: Backlog,
}

/// Pipes of one attach session.
#[derive(Debug)]
pub struct AttachedClient {
    stdin: Option<OwnedFd>,
    /// stdout and stderr; `None` once the client has closed it.
    sinks: [Option<Sink>; 2],
}

impl AttachedClient {
    /// A client with these descriptors, which are made non-blocking.
    pub fn new(stdin: Option<OwnedFd>, stdout: OwnedFd, stderr: Option<OwnedFd>) -> Self {
        for fd in stdin.iter().chain([&stdout]).chain(&stderr) {
            // Descriptors that do not support it (files) never block for long.
            let _ = rustix::io::ioctl_fionbio(fd, true);
        }
        let sink = |fd| Sink { fd, backlog: Backlog::default() };
        Self { stdin, sinks: [Some(sink(stdout)), stderr.map(sink)] }
    }

    /// Descriptor of the client's input.
    pub fn stdin(&self) -> Option<BorrowedFd<'_>> {
        self.stdin.as_ref().map(OwnedFd::as_fd)
    }

    /// Stops reading the client's input.
    pub fn close_stdin(&mut self) {
        self.stdin = None;
    }

    /// Open output descriptors, and whether each has a backlog.
    pub fn sinks(&self) -> impl Iterator<Item = (usize, BorrowedFd<'_>, bool)> {
        let open = self.sinks.iter().enumerate().filter_map(|(at, sink)| Some((at, sink.as_ref()?)));
        open.map(|(at, sink)| (at, sink.fd.as_fd(), !sink.backlog.is_empty()))
    }

    /// Forwards output of the container's stdout (0) or stderr (1).
    pub fn write(&mut self, at: usize, mut bytes: &[u8], now: Instant) {
        let buffered: usize = self.sinks.iter().flatten().map(|sink| sink.backlog.len()).sum();
        let Some(place) = self.sinks.get_mut(at) else { return };
        let Some(sink) = place else { return };
        if sink.backlog.is_empty() {
            match rustix::io::write(&sink.fd, bytes) {
                Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(_) => {
                    *place = None;
                    return;
                }
            }
        }
        sink.backlog.push(bytes, MOST.saturating_sub(buffered), now);
    }

    /// Writes the backlog until the descriptor would block.
    pub fn flush(&mut self, at: usize) {
        let Some(place) = self.sinks.get_mut(at) else { return };
        while let Some(sink) = place {
            if sink.backlog.is_empty() {
                return;
            }
            match rustix::io::write(&sink.fd, sink.backlog.front()) {
                Ok(count) => sink.backlog.taken(count),
                Err(Errno::AGAIN | Errno::INTR) => return,
                Err(_) => *place = None,
            }
        }
    }

    /// Handles a descriptor that the client has closed.
    pub fn closed(&mut self, at: usize) {
        if let Some(place) = self.sinks.get_mut(at) {
            *place = None;
        }
    }

    /// Whether the backlog is empty.
    pub fn is_served(&self) -> bool {
        self.sinks.iter().flatten().all(|sink| sink.backlog.is_empty())
    }

    /// Whether the client has closed all descriptors.
    pub fn is_gone(&self) -> bool {
        self.stdin.is_none() && self.sinks.iter().all(Option::is_none)
    }

    /// When the client is dropped for being slow.
    pub fn dropped_at(&self) -> Option<Instant> {
        self.sinks.iter().flatten().filter_map(|sink| sink.backlog.dropped_at()).min()
    }
}
