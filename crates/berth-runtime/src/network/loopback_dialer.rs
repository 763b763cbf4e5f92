//! Connects to a TCP port on the loopback of a pod's network namespace.
//!
//! A socket stays in the namespace of its creation: creating it inside is fast, and connecting outside blocks no thread
//! while the pod does not respond. Implements spec 09a §4 (port-forward).

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{BorrowedFd, OwnedFd},
    time::Duration,
};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use tokio::{
    net::{TcpSocket, TcpStream},
    time::timeout,
};

use super::errors::NetworkError;
use berth_sys::net_namespace;

/// Connect timeout per address; loopback responds immediately.
const LIMIT: Duration = Duration::from_secs(10);

/// One socket per IP version, or the error of its creation.
pub struct Sockets {
    v4: io::Result<OwnedFd>,
    v6: io::Result<OwnedFd>,
}

/// Creates sockets in a network namespace, the host's if `None`. Blocks for a few system calls.
///
/// # Errors
/// The namespace cannot be entered.
pub fn sockets(namespace: Option<BorrowedFd<'_>>) -> io::Result<Sockets> {
    let made = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let of = |family| Ok(socket_with(family, SocketType::STREAM, flags, None)?);
        Sockets { v4: of(AddressFamily::INET), v6: of(AddressFamily::INET6) }
    };
    match namespace {
        Some(namespace) => net_namespace::within(namespace, || Ok(made())),
        None => Ok(made()),
    }
}

/// Connects to `127.0.0.1`, then to `::1`.
///
/// # Errors
/// The errors of both addresses.
pub async fn connect(sockets: Sockets, sandbox: &str, port: u16) -> Result<TcpStream, NetworkError> {
    let v4 = match to(sockets.v4, (Ipv4Addr::LOCALHOST, port).into()).await {
        Ok(stream) => return Ok(stream),
        Err(error) => error,
    };
    to(sockets.v6, (Ipv6Addr::LOCALHOST, port).into()).await.map_err(|v6| {
        NetworkError::Dial(format!(
            "failed to connect to localhost:{port} inside namespace {sandbox:?}, IPv4: {v4} IPv6 {v6} "
        ))
    })
}

async fn to(socket: io::Result<OwnedFd>, address: SocketAddr) -> io::Result<TcpStream> {
    let socket = TcpSocket::from_std_stream(std::net::TcpStream::from(socket?));
    let connected = timeout(LIMIT, socket.connect(address)).await;
    connected.unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, format!("no response within {LIMIT:?}"))))
}
