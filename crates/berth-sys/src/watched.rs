//! A descriptor that tokio watches: await until it can be read from or written to.

use std::{io, ops::Deref, os::fd::OwnedFd};

use tokio::io::{Interest, unix::AsyncFd};

/// An owned descriptor under watch. It cannot be exchanged for another, which is what makes watching it sound.
#[derive(Debug)]
pub struct Watched(AsyncFd<OwnedFd>);

impl Watched {
    /// Watches a descriptor, which must not block, for reading and writing. Must be called within a runtime.
    ///
    /// # Errors
    /// What the kernel says: files cannot be watched.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        // SAFETY: the descriptor is owned, so it is open and stays what it is until it is dropped, and nobody gets at it
        // but by a shared reference: it is dropped with the watch, never before.
        Ok(Self(unsafe { AsyncFd::register(fd) }?))
    }

    /// Watches a descriptor for what the kernel calls priority alone: files of triggers tell by it. Must be called within a
    /// runtime.
    ///
    /// # Errors
    /// What the kernel says: files cannot be watched.
    pub fn for_priority(fd: OwnedFd) -> io::Result<Self> {
        // SAFETY: as in `new`.
        Ok(Self(unsafe { AsyncFd::register_with_interest(fd, Interest::PRIORITY) }?))
    }
}

impl Deref for Watched {
    type Target = AsyncFd<OwnedFd>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}
