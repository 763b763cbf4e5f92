//! Connects to a port inside a pod.
//!
//! Behaviour: spec 09a §4 (port-forward).

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    os::fd::BorrowedFd,
    time::Duration,
};

use super::errors::NetworkError;
use crate::sys::net_namespace;

/// How long either address has; a loopback answers at once.
const LIMIT: Duration = Duration::from_secs(10);

/// Connects to `127.0.0.1`, then to `::1`; in the machine's own namespace where none is given. Blocking. The stream does
/// not block, as an asynchronous one must be.
///
/// # Errors
/// What both addresses said.
pub fn dial(namespace: Option<BorrowedFd<'_>>, sandbox: &str, port: u16) -> Result<TcpStream, NetworkError> {
    let connected = match namespace {
        Some(namespace) => net_namespace::within(namespace, || Ok(connect(port))),
        None => Ok(connect(port)),
    };
    let connected = connected.map_err(|e| NetworkError::kernel(format!("network namespace of {sandbox}"), e))?;
    connected.map_err(|(v4, v6)| {
        NetworkError::Dial(format!(
            "failed to connect to localhost:{port} inside namespace {sandbox:?}, IPv4: {v4} IPv6 {v6} "
        ))
    })
}

fn connect(port: u16) -> Result<TcpStream, (io::Error, io::Error)> {
    let to = |address: SocketAddr| {
        let stream = TcpStream::connect_timeout(&address, LIMIT)?;
        stream.set_nonblocking(true)?;
        Ok(stream)
    };
    to((Ipv4Addr::LOCALHOST, port).into())
        .or_else(|v4: io::Error| to((Ipv6Addr::LOCALHOST, port).into()).map_err(|v6| (v4, v6)))
}
