//! The daemon's connection: what waits to be sent over it.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use super::{
    super::{
        plan::{Failure, FailureKind, Reply},
        socket::{self, Received},
        wire::{self, Kind},
    },
    events::Events,
};

/// Replies that wait before no more is read: a daemon that asks and does not listen.
const MOST_REPLIES: usize = 64;

/// A question's origin: the answer goes to that connection or nowhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Origin {
    /// Which connection.
    pub connection: u64,
    /// Which question.
    pub sequence: u32,
}

/// A connection.
#[derive(Debug)]
pub struct Connection {
    fd: OwnedFd,
    /// Counts up with each.
    pub number: u64,
    /// Whether the daemon has greeted: before that it is told no events.
    pub is_greeted: bool,
    replies: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
    is_blocked: bool,
}

impl Connection {
    /// A new one.
    pub fn new(fd: OwnedFd, number: u64) -> Self {
        Self { fd, number, is_greeted: false, replies: VecDeque::new(), is_blocked: false }
    }

    /// Its descriptor.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Whether questions are taken now.
    pub fn reads(&self) -> bool {
        self.replies.len() < MOST_REPLIES
    }

    /// Whether it waits for room to send.
    pub fn is_blocked(&self) -> bool {
        self.is_blocked
    }

    /// Whether nothing waits to be sent.
    pub fn is_flushed(&self) -> bool {
        self.replies.is_empty()
    }

    /// Receives a datagram.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn receive(&self) -> io::Result<Received> {
        socket::receive(self.fd.as_fd())
    }

    /// Queues an answer.
    pub fn reply(&mut self, sequence: u32, reply: &Reply, fds: Vec<OwnedFd>) {
        let written = wire::write(Kind::Reply, sequence, reply).or_else(|e| {
            let failure = Failure { kind: FailureKind::Other, text: e.to_string() };
            wire::write(Kind::Reply, sequence, &Reply::Failed(failure))
        });
        if let Ok(bytes) = written {
            self.replies.push_back((bytes, fds));
        }
    }

    /// Sends what waits, and events once the daemon has greeted.
    ///
    /// # Errors
    /// Where the daemon has gone.
    pub fn flush(&mut self, events: &mut Events) -> io::Result<()> {
        self.is_blocked = false;
        while let Some((bytes, fds)) = self.replies.front() {
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(OwnedFd::as_fd).collect();
            if !socket::send(self.fd.as_fd(), bytes, &fds)? {
                self.is_blocked = true;
                return Ok(());
            }
            self.replies.pop_front();
        }
        while let Some(event) = self.is_greeted.then(|| events.next()).flatten() {
            let number = event.number;
            let bytes = wire::write(Kind::Event, 0, event).map_err(io::Error::other)?;
            if !socket::send(self.fd.as_fd(), &bytes, &[])? {
                self.is_blocked = true;
                return Ok(());
            }
            events.told(number);
        }
        Ok(())
    }
}
