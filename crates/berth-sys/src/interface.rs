//! Loopback interface setup: a new network namespace has `lo` down.

use std::{io, os::fd::AsRawFd};

use nix::libc;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// Sets `lo` of this process's network namespace up.
///
/// # Errors
/// The kernel's error.
pub fn set_loopback_up() -> io::Result<()> {
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: all zeros is a valid value of this plain struct.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo\0") {
        *to = from.cast_signed();
    }
    // SAFETY: the request has a NUL-terminated name, outlives the call, and is large enough for the result.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the previous call filled in the flags.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    request.ifr_ifru.ifru_flags = flags | i16::try_from(libc::IFF_UP).unwrap_or(1);
    // SAFETY: as in the previous call; nothing is written back.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) } == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
