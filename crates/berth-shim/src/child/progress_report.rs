//! Progress reports from a process being started to the shim, over a socket pair.
//!
//! One datagram per report; the last `execve` closes the socket. First byte: `P` the container's process exists (PID,
//! start ticks, durations). `T` its pty master, a descriptor. `X` it executes its program next. `F` it failed (kind,
//! text). `N` a namespace, a descriptor. `M` it waits for id maps.
//! The end of the stream after `X` means that the program runs.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
};

use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
    },
};

use super::error_context::{ErrorContext, Step};
use crate::{
    plan::{FailureKind, Namespace, ShimFailure, StartTimings},
    socket::confirm_end,
};

/// Maximum length of a failure's text, bytes.
const LONGEST: usize = 4096;

/// A report of a child.
#[derive(Debug)]
pub(super) enum Message {
    /// The process exists and waits for nobody but its helper.
    Process {
        /// PID in the host's namespace.
        pid: u32,
        /// Start time, clock ticks since boot.
        ticks: u64,
        /// Durations of the steps so far.
        took: StartTimings,
    },
    /// Descriptor of the pty master.
    Terminal(OwnedFd),
    /// The program is executed next.
    Executes,
    /// A namespace and its descriptor.
    Namespace(Namespace, OwnedFd),
    /// The user namespace's id maps must be written now.
    Unmapped,
    /// The start failed.
    Failed(ShimFailure),
}

/// The child's end of the socket pair.
#[derive(Debug)]
pub(super) struct Reporter(OwnedFd);

/// The shim's end of the socket pair.
#[derive(Debug)]
pub(super) struct Reports(OwnedFd);

/// Creates both ends; `execve` closes them.
pub(super) fn pair() -> Step<(Reports, Reporter)> {
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).context(|| "create socket pair")?;
    Ok((Reports(ours), Reporter(theirs)))
}

impl Reporter {
    /// From an inherited descriptor.
    pub(super) fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// The descriptor's number.
    pub(super) fn number(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Its descriptor.
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Reports the container's process.
    pub(super) fn process(&self, pid: u32, ticks: u64, took: StartTimings) -> Step<()> {
        let mut body = vec![b'P'];
        body.extend(pid.to_le_bytes());
        body.extend(ticks.to_le_bytes());
        body.extend(took.root.to_le_bytes());
        body.extend(took.clone.to_le_bytes());
        self.send(&body, None)
    }

    /// Sends the descriptor of the pty master.
    pub(super) fn terminal(&self, master: BorrowedFd<'_>) -> Step<()> {
        self.send(b"T", Some(master))
    }

    /// Sends the descriptor of a namespace.
    pub(super) fn namespace(&self, kind: Namespace, fd: BorrowedFd<'_>) -> Step<()> {
        let index = Namespaces::index(kind);
        self.send(&[b'N', index], Some(fd))
    }

    /// Requests id maps.
    pub(super) fn unmapped(&self) -> Step<()> {
        self.send(b"M", None)
    }

    /// Reports that the program is executed next.
    pub(super) fn executes(&self) -> Step<()> {
        self.send(b"X", None)
    }

    /// Reports a failure; if the report is lost, the shim still observes the exit.
    pub(super) fn failed(&self, failure: &ShimFailure) {
        let kind = match failure.kind {
            FailureKind::Unknown => 0,
            FailureKind::State => 1,
            FailureKind::Program => 2,
            FailureKind::Deadline => 3,
            FailureKind::Other => 4,
        };
        let text = failure.text.as_bytes();
        let mut body = vec![b'F', kind];
        body.extend(text.get(..LONGEST).unwrap_or(text));
        let _peer_may_have_exited = self.send(&body, None);
    }

    fn send(&self, body: &[u8], fd: Option<BorrowedFd<'_>>) -> Step<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        sendmsg(&self.0, &[IoSlice::new(body)], &mut control, SendFlags::NOSIGNAL)
            .map(drop)
            .context(|| "send report to shim")
    }
}

/// Numbers of namespaces in reports.
struct Namespaces;

impl Namespaces {
    const ALL: [Namespace; 4] = [Namespace::User, Namespace::Network, Namespace::Ipc, Namespace::Uts];

    fn index(kind: Namespace) -> u8 {
        match kind {
            Namespace::User => 0,
            Namespace::Network => 1,
            Namespace::Ipc => 2,
            Namespace::Uts => 3,
        }
    }
}

impl AsFd for Reports {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Reports {
    /// Next report; `None` at the end of the stream. `WouldBlock` if none is pending.
    pub(super) fn next(&self) -> io::Result<Option<Message>> {
        confirm_end(|| self.try_receive())
    }

    fn try_receive(&self) -> io::Result<Option<Message>> {
        let mut body = [0_u8; LONGEST + 16];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let got = loop {
            match recvmsg(&self.0, &mut [IoSliceMut::new(&mut body)], &mut control, flags) {
                Err(Errno::INTR) => {}
                // The peer exited with unread data from us in its queue.
                Err(Errno::CONNRESET) => return Ok(None),
                other => break other?,
            }
        };
        let fd = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        let body = body.get(..got.bytes).unwrap_or_default();
        if body.is_empty() {
            return Ok(None);
        }
        let message = parse(body, fd);
        message.map(Some).ok_or_else(|| io::Error::other("invalid message from child process"))
    }

    /// Sends the permission to continue (one byte) to the child.
    pub(super) fn go(&self) -> Step<()> {
        let mut control = SendAncillaryBuffer::default();
        sendmsg(&self.0, &[IoSlice::new(b"G")], &mut control, SendFlags::NOSIGNAL)
            .map(drop)
            .context(|| "send message to child process")
    }
}

impl Reporter {
    /// Waits for the shim's permission to continue.
    pub(super) fn wait(&self) -> Step<()> {
        let mut byte = [0_u8; 1];
        loop {
            match rustix::net::recv(&self.0, &mut byte, RecvFlags::empty()) {
                Err(Errno::INTR) => {}
                Ok((_, 0)) => return Err(super::error_context::failure("shim exited")),
                other => return other.map(drop).context(|| "wait for shim"),
            }
        }
    }
}

fn parse(body: &[u8], fd: Option<OwnedFd>) -> Option<Message> {
    let (first, rest) = body.split_first()?;
    match first {
        b'P' => {
            let (pid, ticks) = rest.split_first_chunk::<4>()?;
            let (ticks, rest) = ticks.split_first_chunk::<8>()?;
            let (root, rest) = rest.split_first_chunk::<4>()?;
            let (clone, _) = rest.split_first_chunk::<4>()?;
            let took = StartTimings { root: u32::from_le_bytes(*root), clone: u32::from_le_bytes(*clone) };
            Some(Message::Process { pid: u32::from_le_bytes(*pid), ticks: u64::from_le_bytes(*ticks), took })
        }
        b'T' => Some(Message::Terminal(fd?)),
        b'X' => Some(Message::Executes),
        b'M' => Some(Message::Unmapped),
        b'N' => Some(Message::Namespace(*Namespaces::ALL.get(usize::from(*rest.first()?))?, fd?)),
        b'F' => {
            let (kind, text) = rest.split_first()?;
            let kind = match kind {
                0 => FailureKind::Unknown,
                1 => FailureKind::State,
                2 => FailureKind::Program,
                3 => FailureKind::Deadline,
                _ => FailureKind::Other,
            };
            Some(Message::Failed(ShimFailure { kind, text: String::from_utf8_lossy(text).into_owned() }))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_arrive_in_order() {
        let (reports, reporter) = pair().expect("a pair");
        assert_eq!(reports.next().expect_err("nothing yet").kind(), io::ErrorKind::WouldBlock);
        reporter.process(7, 1 << 40, StartTimings { root: 8, clone: 9 }).expect("sent");
        reporter.namespace(Namespace::Uts, reporter.as_fd()).expect("sent");
        reporter.failed(&ShimFailure { kind: FailureKind::Program, text: "x".repeat(LONGEST + 1) });
        reporter.executes().expect("sent");
        drop(reporter);
        let Ok(Some(Message::Process { pid, ticks, took })) = reports.next() else { panic!("a process") };
        assert_eq!((pid, ticks, took), (7, 1 << 40, StartTimings { root: 8, clone: 9 }));
        assert!(matches!(reports.next(), Ok(Some(Message::Namespace(Namespace::Uts, _)))));
        let Ok(Some(Message::Failed(failure))) = reports.next() else { panic!("a failure") };
        assert_eq!((failure.kind, failure.text.len()), (FailureKind::Program, LONGEST));
        assert!(matches!(reports.next(), Ok(Some(Message::Executes))));
        assert!(matches!(reports.next(), Ok(None)), "the end");
        for strange in [&b"P1"[..], b"T", b"N", b"N\x09", b"F", b"?"] {
            assert!(parse(strange, None).is_none(), "{strange:?}");
        }
    }
}
