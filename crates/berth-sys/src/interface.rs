//! The loopback interface of a network namespace, which is down when the namespace is made.

use std::{io, os::fd::AsRawFd};

use nix::libc;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// Sets `lo` of this process's network namespace up.
///
/// # Errors
/// What the kernel says.
pub fn set_loopback_up() -> io::Result<()> {
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: all zeros is a valid value of this plain record.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo\0") {
        *to = from.cast_signed();
    }
    // SAFETY: the request has a name that ends with a zero, outlives the call and has room for the answer.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call before filled in the flags.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    request.ifr_ifru.ifru_flags = flags | i16::try_from(libc::IFF_UP).unwrap_or(1);
    // SAFETY: as the call before; nothing is asked back.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) } == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
