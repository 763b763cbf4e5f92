//! Unix seqpacket socket of the shim protocol: datagrams with file descriptors, for both peers.
//!
//! The socket's path may exceed the kernel's limit of 107 bytes: it is addressed through a descriptor of its directory.

use std::{
    io,
    mem::MaybeUninit,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
};

use rustix::{
    cmsg_space,
    fs::{Mode, OFlags},
    io::{Errno, IoSlice, IoSliceMut},
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
    },
};

use super::{plan::MAX_BODY, wire::HEADER};

/// File name of the control socket in a shim's directory.
pub const NAME: &str = "ctl.sock";
/// Maximum number of descriptors per datagram.
pub const MAX_FDS: usize = 8;
/// Maximum number of connections waiting for accept.
const BACKLOG: i32 = 8;

/// Datagram, end of the stream, or nothing yet.
#[derive(Debug)]
pub enum ReceiveResult {
    /// A datagram and its descriptors.
    Datagram(Vec<u8>, Vec<OwnedFd>),
    /// No datagram is pending.
    Nothing,
    /// The peer closed the connection.
    End,
}

/// Listens in a shim's directory; only root may connect.
///
/// # Errors
/// The kernel's error.
pub fn listen(folder: &Path) -> io::Result<OwnedFd> {
    let folder = rustix::fs::open(folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    match rustix::fs::unlinkat(&folder, NAME, rustix::fs::AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(e) => return Err(e.into()),
    }
    let socket = new_socket()?;
    rustix::net::bind(&socket, &address(&folder)?)?;
    rustix::fs::chmodat(&folder, NAME, Mode::RUSR | Mode::WUSR, rustix::fs::AtFlags::empty())?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Connects to the shim of a directory. Does not block: the kernel queues the connection or refuses.
///
/// # Errors
/// The kernel's error: nobody listens, or the queue is full.
pub fn connect(folder: &Path) -> io::Result<OwnedFd> {
    let folder = rustix::fs::open(folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let socket = new_socket()?;
    rustix::net::connect(&socket, &address(&folder)?)?;
    Ok(socket)
}

fn address(folder: &OwnedFd) -> io::Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new(format!("/proc/self/fd/{}/{NAME}", folder.as_raw_fd()))?)
}

fn new_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    enlarge(&socket);
    Ok(socket)
}

/// Enlarges the send buffer: a datagram must fit into it as a whole. If the large size is refused, long plans fail with
/// an error about their length.
fn enlarge(socket: &OwnedFd) {
    let wanted = 2 * (MAX_BODY + HEADER);
    if sockopt::set_socket_send_buffer_size_force(socket, wanted).is_err() {
        let _ = sockopt::set_socket_send_buffer_size(socket, wanted); // as large as permitted
    }
}

/// Accepts a connection; `None` if none is pending. Closes connections of other users.
///
/// # Errors
/// The kernel's error.
pub fn accept(listener: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = match rustix::net::accept_with(listener, flags) {
        Ok(socket) => socket,
        Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => return Ok(None),
        Err(e) => return Err(e.into()),
    };
    enlarge(&socket);
    let peer = sockopt::socket_peercred(&socket)?;
    Ok((peer.uid == rustix::process::geteuid()).then_some(socket))
}

/// Sends a datagram with descriptors; returns false if the queue is full.
///
/// # Errors
/// The kernel's error; [`io::ErrorKind::BrokenPipe`] if the peer has closed.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<bool> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors for one message"));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    match rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, flags) {
        Ok(_) => Ok(true),
        Err(Errno::AGAIN | Errno::INTR) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Repeats a read that reports the end of the stream (`None`), and believes it only the second time.
///
/// On a non-blocking socket the kernel (`unix_dgram_recvmsg`) checks the queue first, and then whether the peer has
/// closed. A peer that sends and closes between the two checks appears as an end of the stream while its datagram is
/// still queued: about once in a thousand times on machines whose CPUs are preempted for milliseconds.
///
/// # Errors
/// Those of `look`.
pub fn confirm_end<T, E>(mut attempt: impl FnMut() -> Result<Option<T>, E>) -> Result<Option<T>, E> {
    match attempt()? {
        None => attempt(),
        found => Ok(found),
    }
}

/// Receives a datagram without blocking.
///
/// # Errors
/// The kernel's error, or that the datagram is too long.
pub fn receive(socket: BorrowedFd<'_>) -> io::Result<ReceiveResult> {
    let length = match confirm_end(|| next_length(socket)) {
        Ok(None) => return Ok(ReceiveResult::End),
        Ok(Some(length)) => length,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(ReceiveResult::Nothing),
        Err(e) => return Err(e.into()),
    };
    if length > MAX_BODY + HEADER {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("message of {length} bytes is too long")));
    }
    let mut bytes = vec![0; length];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags) {
        Ok(received) => received,
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNRESET) => return Ok(ReceiveResult::Nothing),
        Err(e) => return Err(e.into()),
    };
    let fds: Vec<OwnedFd> = ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    bytes.truncate(received.bytes);
    Ok(ReceiveResult::Datagram(bytes, fds))
}

/// Length of the next datagram; `None` at the end of the stream, which resembles an empty one: nobody sends those.
fn next_length(socket: BorrowedFd<'_>) -> Result<Option<usize>, Errno> {
    let peek = RecvFlags::PEEK | RecvFlags::TRUNC | RecvFlags::DONTWAIT;
    match rustix::net::recv(socket, &mut [0_u8; 0][..], peek) {
        Ok((_, length)) => Ok(Some(length).filter(|length| *length > 0)),
        // The peer exited with unread data from us in its queue.
        Err(Errno::CONNRESET) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::{os::fd::AsFd, sync::mpsc};

    use super::*;

    #[test]
    fn an_end_is_confirmed_by_a_second_read() {
        let past = |results: &[Option<u8>]| {
            let mut results = results.iter();
            confirm_end(|| Ok::<_, ()>(*results.next().expect("asked twice at most")))
        };
        assert_eq!(past(&[Some(1)]), Ok(Some(1)));
        assert_eq!(past(&[None, Some(1)]), Ok(Some(1)));
        assert_eq!(past(&[None, None]), Ok(None));
        assert_eq!(confirm_end::<(), _>(|| Err(3)), Err(3));
    }

    /// The sender may close in each turn at exactly the critical moment.
    #[test]
    fn datagrams_sent_before_close_are_received() {
        let (to_sender, sockets) = mpsc::channel::<OwnedFd>();
        let sender = std::thread::spawn(move || {
            for socket in sockets {
                send(socket.as_fd(), b"x", &[]).expect("sent");
            }
        });
        let flags = SocketFlags::CLOEXEC;
        for turn in 0..5000 {
            let (ours, theirs) =
                rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a pair");
            to_sender.send(theirs).expect("taken");
            let mut received = 0;
            loop {
                match receive(ours.as_fd()).expect("received") {
                    ReceiveResult::Datagram(..) => received += 1,
                    ReceiveResult::Nothing => {}
                    ReceiveResult::End => break,
                }
            }
            assert_eq!(received, 1, "turn {turn}");
        }
        drop(to_sender);
        sender.join().expect("no panic");
    }
}
