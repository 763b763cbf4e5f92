//! Somebody attached to a container: takes what the container writes from now on, and may write to it.
//!
//! A container never waits for a client: what a client does not take is held, to a bound, and then lost to it.
//! Behaviour: spec 09a §4.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Instant,
};

use rustix::io::Errno;

use super::backlog::{Backlog, MOST};

/// Most clients of one container.
pub const MOST_CLIENTS: usize = 16;

/// One end that is written to.
#[derive(Debug)]
struct Sink {
    fd: OwnedFd,
    backlog: Backlog,
}

/// A client.
#[derive(Debug)]
pub struct Client {
    stdin: Option<OwnedFd>,
    /// stdout and stderr; none once the client has closed it.
    sinks: [Option<Sink>; 2],
}

impl Client {
    /// A client with these ends, which are made non-blocking.
    pub fn new(stdin: Option<OwnedFd>, stdout: OwnedFd, stderr: Option<OwnedFd>) -> Self {
        for fd in stdin.iter().chain([&stdout]).chain(&stderr) {
            // Ends that cannot be made so (files) never block for long.
            let _ = rustix::io::ioctl_fionbio(fd, true);
        }
        let sink = |fd| Sink { fd, backlog: Backlog::default() };
        Self { stdin, sinks: [Some(sink(stdout)), stderr.map(sink)] }
    }

    /// Where its input comes from.
    pub fn stdin(&self) -> Option<BorrowedFd<'_>> {
        self.stdin.as_ref().map(OwnedFd::as_fd)
    }

    /// Takes no more input from it.
    pub fn close_stdin(&mut self) {
        self.stdin = None;
    }

    /// The ends that are still open, and whether bytes wait for each.
    pub fn sinks(&self) -> impl Iterator<Item = (usize, BorrowedFd<'_>, bool)> {
        let open = self.sinks.iter().enumerate().filter_map(|(at, sink)| Some((at, sink.as_ref()?)));
        open.map(|(at, sink)| (at, sink.fd.as_fd(), !sink.backlog.is_empty()))
    }

    /// Passes on what the container wrote to stdout (0) or stderr (1).
    pub fn write(&mut self, at: usize, mut bytes: &[u8], now: Instant) {
        let held: usize = self.sinks.iter().flatten().map(|sink| sink.backlog.len()).sum();
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
        sink.backlog.push(bytes, MOST.saturating_sub(held), now);
    }

    /// Passes on what waits, as far as the client takes it.
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

    /// One of its ends was closed on its side.
    pub fn closed(&mut self, at: usize) {
        if let Some(place) = self.sinks.get_mut(at) {
            *place = None;
        }
    }

    /// Whether nothing waits for it.
    pub fn is_served(&self) -> bool {
        self.sinks.iter().flatten().all(|sink| sink.backlog.is_empty())
    }

    /// Whether it has closed everything.
    pub fn is_gone(&self) -> bool {
        self.stdin.is_none() && self.sinks.iter().all(Option::is_none)
    }

    /// When it is dropped for being slow.
    pub fn dropped_at(&self) -> Option<Instant> {
        self.sinks.iter().flatten().filter_map(|sink| sink.backlog.dropped_at()).min()
    }
}
