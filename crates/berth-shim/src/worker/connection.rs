//! Connection to the agent: queued replies and unacknowledged events.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use super::{
    super::{
        plan::{FailureKind, Reply, ShimFailure},
        socket::{self, ReceiveResult},
        wire::{self, DatagramKind},
    },
    events::Events,
};

/// Queued replies at which the shim stops reading requests: the agent does not receive its replies.
const MOST_REPLIES: usize = 64;

/// Origin of a request: the reply is sent over that connection or dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestOrigin {
    /// Connection number.
    pub connection: u64,
    /// Sequence number of the request.
    pub sequence: u32,
}

/// Socket to the agent, with the datagrams that wait to be sent.
#[derive(Debug)]
pub struct AgentConnection {
    fd: OwnedFd,
    /// Number of the connection, counting up.
    pub number: u64,
    /// Whether the agent has sent `Hello`: before that it receives no events.
    pub is_greeted: bool,
    replies: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
    is_blocked: bool,
}

impl AgentConnection {
    /// A new connection without queued replies.
    pub fn new(fd: OwnedFd, number: u64) -> Self {
        Self { fd, number, is_greeted: false, replies: VecDeque::new(), is_blocked: false }
    }

    /// Descriptor of the connection.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Whether requests are read at present.
    pub fn reads(&self) -> bool {
        self.replies.len() < MOST_REPLIES
    }

    /// Whether it waits for space in the send queue.
    pub fn is_blocked(&self) -> bool {
        self.is_blocked
    }

    /// Whether no replies are queued.
    pub fn is_flushed(&self) -> bool {
        self.replies.is_empty()
    }

    /// Receives a datagram.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn receive(&self) -> io::Result<ReceiveResult> {
        socket::receive(self.fd.as_fd())
    }

    /// Queues a reply.
    pub fn reply(&mut self, sequence: u32, reply: &Reply, fds: Vec<OwnedFd>) {
        let written = wire::write(DatagramKind::Reply, sequence, reply).or_else(|e| {
            let failure = ShimFailure { kind: FailureKind::Other, text: e.to_string() };
            wire::write(DatagramKind::Reply, sequence, &Reply::Failed(failure))
        });
        if let Ok(bytes) = written {
            self.replies.push_back((bytes, fds));
        }
    }

    /// Sends queued replies, and events once the agent has sent `Hello`.
    ///
    /// # Errors
    /// If the agent has disconnected.
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
            let bytes = wire::write(DatagramKind::Event, 0, event).map_err(io::Error::other)?;
            if !socket::send(self.fd.as_fd(), &bytes, &[])? {
                self.is_blocked = true;
                return Ok(());
            }
            events.mark_sent(number);
        }
        Ok(())
    }
}
