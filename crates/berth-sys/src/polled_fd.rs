//! Owned file descriptor registered with tokio: await readability or writability.

use std::{io, ops::Deref, os::fd::OwnedFd};

use tokio::io::{Interest, unix::AsyncFd};

/// A registered owned descriptor. It cannot be replaced by another, which makes the registration sound.
#[derive(Debug)]
pub struct PolledFd(AsyncFd<OwnedFd>);

impl PolledFd {
    /// Registers a non-blocking descriptor for reading and writing. Must be called within a runtime.
    ///
    /// # Errors
    /// The kernel's error: regular files cannot be polled.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        // SAFETY: the descriptor is owned, so it is open and unchanged until it is dropped, and access is by shared
        // reference only: it is dropped with the registration, never before.
        Ok(Self(unsafe { AsyncFd::register(fd) }?))
    }

    /// Registers a descriptor for priority events (`POLLPRI`) only: PSI triggers notify by them. Must be called within
    /// a runtime.
    ///
    /// # Errors
    /// The kernel's error: regular files cannot be polled.
    pub fn for_priority(fd: OwnedFd) -> io::Result<Self> {
        // SAFETY: as in `new`.
        Ok(Self(unsafe { AsyncFd::register_with_interest(fd, Interest::PRIORITY) }?))
    }
}

impl Deref for PolledFd {
    type Target = AsyncFd<OwnedFd>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}
