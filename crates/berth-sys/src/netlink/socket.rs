//! Netlink socket: requests, batches, nf_tables transactions, dumps, and multicast notifications.
//!
//! Every receive blocks for at most [`LIMIT`]; the kernel answers within the system call, so that only a lost reply
//! makes a caller wait. A notification socket does not block: its owner polls the descriptor.

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

/// Receive timeout of a reply.
pub const LIMIT: Duration = Duration::from_secs(10);
/// Receive buffer size, bytes; the kernel's dumps come in chunks of at most 32 KiB.
const RECEIVE: usize = 64 * 1024;
/// Send buffer size of the socket, bytes.
const SEND: usize = 4 << 20;
/// `NLMSG_ERROR`, an acknowledgement if its error number is 0.
const ERROR: u16 = 2;
/// `NLMSG_DONE`.
const DONE: u16 = 3;
/// `NLM_F_DUMP_INTR`: the dumped objects changed during the dump.
const INTERRUPTED: u16 = 0x10;
/// Maximum attempts for a dump that was interrupted.
const DUMP_TRIES: u32 = 5;

/// Netlink family of a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NetlinkFamily {
    /// `NETLINK_ROUTE`: links, addresses, routes, queueing disciplines.
    Route,
    /// `NETLINK_NETFILTER`: packet filters and conntrack.
    Netfilter,
}

/// The failed message of a batch.
#[derive(Debug, thiserror::Error)]
#[error("message {index}: {source}")]
pub struct BatchError {
    /// Index of the message in the batch, from 0.
    pub index: usize,
    /// The kernel's error.
    pub source: io::Error,
}

impl BatchError {
    /// Whether the kernel returned this errno.
    pub fn is(&self, errno: Errno) -> bool {
        self.source.raw_os_error() == Some(errno as i32)
    }
}

impl From<BatchError> for io::Error {
    fn from(failure: BatchError) -> Self {
        failure.source
    }
}

/// One message of a reply.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reply {
    /// Message type (`nlmsg_type`).
    pub kind: u16,
    /// Payload after `nlmsghdr`.
    pub body: Vec<u8>,
}

/// A netlink socket in the network namespace that its thread was in.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
    sequence: u32,
}

impl Socket {
    /// Opens a socket for requests.
    ///
    /// # Errors
    /// The kernel's error: usually that it lacks the protocol.
    pub fn open(protocol: NetlinkFamily) -> io::Result<Self> {
        let socket = Self::bound(protocol, SockFlag::SOCK_CLOEXEC, 0)?;
        let limit = TimeVal::new(i64::try_from(LIMIT.as_secs()).unwrap_or(10), 0);
        setsockopt(&socket.fd, sockopt::ReceiveTimeout, &limit)?;
        // If the buffer stays at its default size, the kernel refuses larger batches and send reports that.
        let _ = setsockopt(&socket.fd, sockopt::SndBufForce, &SEND);
        Ok(socket)
    }

    /// Opens a non-blocking socket subscribed to these multicast groups (a bit mask; the first group is 1).
    ///
    /// # Errors
    /// The kernel's error.
    pub fn subscribe(protocol: NetlinkFamily, groups: u32) -> io::Result<Self> {
        Self::bound(protocol, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, groups)
    }

    /// Registers the socket with the async runtime, which then notifies its owner of readability.
    ///
    /// # Errors
    /// The runtime's error.
    pub fn into_async(self) -> io::Result<AsyncFd<Self>> {
        // SAFETY: the descriptor is owned, `as_raw_fd` always returns the same one, and nothing closes it before the
        // socket is dropped, which `AsyncFd` does after it has deregistered it.
        unsafe { AsyncFd::register(self) }.map_err(Into::into)
    }

    fn bound(protocol: NetlinkFamily, flags: SockFlag, groups: u32) -> io::Result<Self> {
        let protocol = match protocol {
            NetlinkFamily::Route => SockProtocol::NetlinkRoute,
            NetlinkFamily::Netfilter => SockProtocol::NetlinkNetFilter,
        };
        let fd = socket(AddressFamily::Netlink, SockType::Raw, flags, protocol)?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, groups))?;
        // The kernel chooses the address; reading it back proves that it is a netlink address.
        let _: NetlinkAddr = getsockname(fd.as_raw_fd())?;
        Ok(Self { fd, sequence: 1 })
    }

    /// Sends one message and waits for its acknowledgement.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn request(&mut self, message: Message) -> io::Result<()> {
        self.request_all(vec![message]).map_err(Into::into)
    }

    /// Sends messages in one system call. The kernel tries all of them; the first failure is returned.
    ///
    /// # Errors
    /// The first message that failed.
    pub fn request_all(&mut self, messages: Vec<Message>) -> Result<(), BatchError> {
        match self.request_each(messages).map_err(|source| BatchError { index: 0, source })?.into_iter().next() {
            None => Ok(()),
            Some((index, source)) => Err(BatchError { index, source }),
        }
    }

    /// Like [`Self::request_all`], but returns every failure: index of the message and error.
    ///
    /// # Errors
    /// If no reply arrived.
    pub fn request_each(&mut self, messages: Vec<Message>) -> io::Result<Vec<(usize, io::Error)>> {
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

    /// Sends an nf_tables transaction between its begin and end message: all or nothing.
    ///
    /// # Errors
    /// The first message that failed; nothing was changed then.
    pub fn transaction(&mut self, begin: Message, messages: Vec<Message>, end: Message) -> Result<(), BatchError> {
        let io = |source| BatchError { index: 0, source };
        let (first, count) = (self.sequence, messages.len());
        if count == 0 {
            return Ok(());
        }
        let mut bytes = self.stamped(vec![begin], false);
        let mut messages = messages;
        let last = messages.pop();
        bytes.extend(self.stamped(messages, false));
        // The kernel replies to every message that fails, and to the last in any case.
        bytes.extend(self.stamped(last.into_iter().collect(), true));
        bytes.extend(self.stamped(vec![end], false));
        self.send(&bytes).map_err(io)?;
        let mut failure: Option<BatchError> = None;
        loop {
            for (kind, _, sequence, body) in message::messages(&self.receive().map_err(io)?) {
                let place = sequence.wrapping_sub(first) as usize;
                if kind != ERROR || place > count {
                    continue;
                }
                if let Some(source) = error_in(body) {
                    failure.get_or_insert(BatchError { index: place.saturating_sub(1), source });
                }
                // Index 0 is the begin message: then the whole transaction was refused.
                if place == 0 || place == count {
                    return failure.map_or(Ok(()), Err);
                }
            }
        }
    }

    /// Sends a request that is not a dump and returns its reply.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn query(&mut self, message: Message) -> io::Result<Option<Reply>> {
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

    /// Requests a complete dump.
    ///
    /// # Errors
    /// The kernel's error; `EINTR` if the objects kept changing during the dump.
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
        let bytes = self.stamped(vec![message.with_flags(DUMP)], false);
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

    /// Receives pending notifications of a subscribed socket; `None` if there are none at present.
    ///
    /// # Errors
    /// `ENOBUFS` if notifications were lost.
    pub fn receive_notifications(&self) -> io::Result<Option<Vec<Reply>>> {
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

/// Error of a reply; `None` for an acknowledgement.
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
                let _ = (rtnetlink::link(&reply), rtnetlink::address_of(&reply), rtnetlink::route(&reply), rtnetlink::removed_link(&reply));
                let _ = (nf_tables::chain(&reply), nf_tables::rule_location(&reply), nf_tables::removes_from(&reply, "berth"));
                let _ = conntrack::connection(&reply);
            }
        }
    }
}
