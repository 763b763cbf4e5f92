//! A netlink socket: questions, batches, dumps and news.
//!
//! Blocking with [`LIMIT`] on every receive; the kernel answers within the system call, so that only a kernel that lost an
//! answer makes anybody wait. A watching socket does not block: its owner polls the descriptor.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use nix::{
    errno::Errno,
    sys::{
        socket::{
            AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, getsockname, recv, send,
            setsockopt, socket, sockopt,
        },
        time::TimeVal,
    },
};

use tokio::io::unix::AsyncFd;

use super::message::{self, DUMP, Message, u32_at};

/// The longest wait for an answer.
pub const LIMIT: Duration = Duration::from_secs(10);
/// Room for one receive; the kernel's dumps come in pieces of 32 KiB at most.
const RECEIVE: usize = 64 * 1024;
/// Room for what is sent in one go.
const SEND: usize = 4 << 20;
/// `NLMSG_ERROR`, also a success when its number is 0.
const ERROR: u16 = 2;
/// `NLMSG_DONE`.
const DONE: u16 = 3;
/// `NLM_F_DUMP_INTR`: what was listed changed meanwhile.
const INTERRUPTED: u16 = 0x10;
/// Times a dump is begun anew because it was interrupted.
const DUMP_TRIES: u32 = 5;

/// Whom a socket talks to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protocol {
    /// Links, addresses, routes, queues.
    Route,
    /// Packet filters and tracked connections.
    Netfilter,
}

/// Which message of a batch failed, and why.
#[derive(Debug, thiserror::Error)]
#[error("message {index}: {source}")]
pub struct Failure {
    /// Counted from 0.
    pub index: usize,
    /// What the kernel said.
    pub source: io::Error,
}

impl Failure {
    /// Whether the kernel said this.
    pub fn is(&self, errno: Errno) -> bool {
        self.source.raw_os_error() == Some(errno as i32)
    }
}

impl From<Failure> for io::Error {
    fn from(failure: Failure) -> Self {
        failure.source
    }
}

/// One message of an answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reply {
    /// Its type.
    pub kind: u16,
    /// What follows `nlmsghdr`.
    pub body: Vec<u8>,
}

/// A socket of the network namespace its thread was in.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
    sequence: u32,
}

impl Socket {
    /// For questions.
    ///
    /// # Errors
    /// Whatever the kernel says: mostly that it lacks the protocol.
    pub fn open(protocol: Protocol) -> io::Result<Self> {
        let socket = Self::bound(protocol, SockFlag::SOCK_CLOEXEC, 0)?;
        let limit = TimeVal::new(i64::try_from(LIMIT.as_secs()).unwrap_or(10), 0);
        setsockopt(&socket.fd, sockopt::ReceiveTimeout, &limit)?;
        // Larger batches than the usual room are refused by the kernel, which names them then.
        let _ = setsockopt(&socket.fd, sockopt::SndBufForce, &SEND);
        Ok(socket)
    }

    /// For news of these groups (a bit for each, the first is 1); does not block.
    ///
    /// # Errors
    /// Whatever the kernel says.
    pub fn watching(protocol: Protocol, groups: u32) -> io::Result<Self> {
        Self::bound(protocol, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, groups)
    }

    /// The same, told by the runtime when news came in.
    ///
    /// # Errors
    /// What the runtime says.
    pub fn polled(self) -> io::Result<AsyncFd<Self>> {
        // SAFETY: the descriptor is owned, `as_raw_fd` always tells the same one, and nothing closes it before the socket
        // is dropped, which `AsyncFd` does after it has deregistered it.
        unsafe { AsyncFd::register(self) }.map_err(Into::into)
    }

    fn bound(protocol: Protocol, flags: SockFlag, groups: u32) -> io::Result<Self> {
        let protocol = match protocol {
            Protocol::Route => SockProtocol::NetlinkRoute,
            Protocol::Netfilter => SockProtocol::NetlinkNetFilter,
        };
        let fd = socket(AddressFamily::Netlink, SockType::Raw, flags, protocol)?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, groups))?;
        // The kernel's choice; asking for it proves that the address is one.
        let _: NetlinkAddr = getsockname(fd.as_raw_fd())?;
        Ok(Self { fd, sequence: 1 })
    }

    /// Does one thing.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn request(&mut self, message: Message) -> io::Result<()> {
        self.all(vec![message]).map_err(Into::into)
    }

    /// Does things one after the other, in one system call. The kernel tries them all; the first failure is told.
    ///
    /// # Errors
    /// The first message that failed.
    pub fn all(&mut self, messages: Vec<Message>) -> Result<(), Failure> {
        match self.each(messages).map_err(|source| Failure { index: 0, source })?.into_iter().next() {
            None => Ok(()),
            Some((index, source)) => Err(Failure { index, source }),
        }
    }

    /// Like [`Self::all`], telling every failure: the message's place and why.
    ///
    /// # Errors
    /// Where no answer came.
    pub fn each(&mut self, messages: Vec<Message>) -> io::Result<Vec<(usize, io::Error)>> {
        let first = self.sequence;
        let count = u32::try_from(messages.len()).map_err(|_| Errno::EMSGSIZE)?;
        let bytes = self.stamped(messages, true);
        if bytes.is_empty() {
            return Ok(Vec::new());
        }
        self.send(&bytes)?;
        let (mut failed, mut answered) = (Vec::new(), 0);
        while answered < count {
            for (kind, _, sequence, body) in message::messages(&self.receive()?) {
                let index = sequence.wrapping_sub(first);
                if kind != ERROR || index >= count {
                    continue;
                }
                answered += 1;
                if let Some(e) = error_in(body) {
                    failed.push((index as usize, e));
                }
            }
        }
        Ok(failed)
    }

    /// Does all or nothing: a transaction of the packet filter, between its two marks.
    ///
    /// # Errors
    /// The first message that failed; nothing was changed then.
    pub fn transaction(&mut self, begin: Message, messages: Vec<Message>, end: Message) -> Result<(), Failure> {
        let io = |source| Failure { index: 0, source };
        let (first, count) = (self.sequence, messages.len());
        if count == 0 {
            return Ok(());
        }
        let mut bytes = self.stamped(vec![begin], false);
        let mut messages = messages;
        let last = messages.pop();
        bytes.extend(self.stamped(messages, false));
        // The kernel answers every message that fails, and the last in any case.
        bytes.extend(self.stamped(last.into_iter().collect(), true));
        bytes.extend(self.stamped(vec![end], false));
        self.send(&bytes).map_err(io)?;
        let mut failure: Option<Failure> = None;
        loop {
            for (kind, _, sequence, body) in message::messages(&self.receive().map_err(io)?) {
                let place = sequence.wrapping_sub(first) as usize;
                if kind != ERROR || place > count {
                    continue;
                }
                if let Some(source) = error_in(body) {
                    failure.get_or_insert(Failure { index: place.saturating_sub(1), source });
                }
                // Place 0 is the mark: then the whole of it was refused.
                if place == 0 || place == count {
                    return failure.map_or(Ok(()), Err);
                }
            }
        }
    }

    /// The answers to one question that is not a list.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn ask(&mut self, message: Message) -> io::Result<Option<Reply>> {
        let first = self.sequence;
        let bytes = self.stamped(vec![message], true);
        self.send(&bytes)?;
        let mut found = None;
        loop {
            for (kind, _, sequence, body) in message::messages(&self.receive()?) {
                match (sequence == first, kind) {
                    (false, _) => {}
                    (true, ERROR) => return error_in(body).map_or(Ok(found), Err),
                    (true, kind) => found = Some(Reply { kind, body: body.to_vec() }),
                }
            }
        }
    }

    /// A whole list.
    ///
    /// # Errors
    /// What the kernel says; `EINTR` where the list changed again and again while it was read.
    pub fn dump(&mut self, message: &Message) -> io::Result<Vec<Reply>> {
        for _ in 0..DUMP_TRIES {
            if let Some(list) = self.dump_once(message.clone())? {
                return Ok(list);
            }
        }
        Err(Errno::EINTR.into())
    }

    fn dump_once(&mut self, message: Message) -> io::Result<Option<Vec<Reply>>> {
        let first = self.sequence;
        let bytes = self.stamped(vec![message.flagged(DUMP)], false);
        self.send(&bytes)?;
        let (mut list, mut whole) = (Vec::new(), true);
        loop {
            for (kind, flags, sequence, body) in message::messages(&self.receive()?) {
                if sequence != first {
                    continue;
                }
                whole &= flags & INTERRUPTED == 0;
                match kind {
                    DONE => return Ok(whole.then_some(list)),
                    ERROR => return error_in(body).map_or(Ok(Some(Vec::new())), Err),
                    kind => list.push(Reply { kind, body: body.to_vec() }),
                }
            }
        }
    }

    /// What came in on a watching socket; `None` when there is nothing more now.
    ///
    /// # Errors
    /// `ENOBUFS` where news were lost.
    pub fn news(&self) -> io::Result<Option<Vec<Reply>>> {
        match self.receive() {
            Ok(bytes) => {
                let all = message::messages(&bytes);
                Ok(Some(all.map(|(kind, _, _, body)| Reply { kind, body: body.to_vec() }).collect()))
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn stamped(&mut self, messages: Vec<Message>, wants_answers: bool) -> Vec<u8> {
        let mut bytes = Vec::new();
        for mut message in messages {
            message.stamp(self.sequence, wants_answers);
            self.sequence = self.sequence.wrapping_add(1);
            bytes.extend(message.bytes());
        }
        bytes
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        match send(self.fd.as_raw_fd(), bytes, MsgFlags::empty())? {
            sent if sent == bytes.len() => Ok(()),
            _ => Err(Errno::EMSGSIZE.into()),
        }
    }

    fn receive(&self) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; RECEIVE];
        loop {
            match recv(self.fd.as_raw_fd(), &mut bytes, MsgFlags::empty()) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(length) => {
                    bytes.truncate(length);
                    return Ok(bytes);
                }
                Err(Errno::EINTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> i32 {
        self.fd.as_raw_fd()
    }
}

/// The error of an answer; none where it is a success.
fn error_in(body: &[u8]) -> Option<io::Error> {
    match u32_at(body, 0).map(|number| number.cast_signed()) {
        Some(0) => None,
        Some(number) => Some(io::Error::from_raw_os_error(number.saturating_neg())),
        None => Some(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::*, *};

    proptest! {
        #[test]
        fn any_answer_is_read(bytes in proptest::collection::vec(any::<u8>(), 0..300), kind in 0u16..4096) {
            let _ = error_in(&bytes);
            for kind in [kind, 16, 20, 24, 1 << 8, 10 << 8, 10 << 8 | 3, 10 << 8 | 6] {
                let reply = Reply { kind, body: bytes.clone() };
                let _ = (route::link(&reply), route::address_of(&reply), route::route(&reply), route::removed_link(&reply));
                let _ = (filter::chain(&reply), filter::rule_of(&reply), filter::removes_of(&reply, "berth"));
                let _ = connections::connection(&reply);
            }
        }
    }
}
