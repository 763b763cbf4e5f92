//! A container's stdin: what clients write is passed on as fast as the container reads, and no faster.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

/// Bytes taken from clients ahead of the container.
pub const AHEAD: usize = 4096;

/// A container's stdin.
#[derive(Debug)]
pub struct Input {
    /// The pipe, or the terminal's master; none once closed.
    fd: Option<OwnedFd>,
    held: Vec<u8>,
    is_closing: bool,
    /// Whether the end of the first client's input closes it.
    pub is_once: bool,
}

impl Input {
    /// Over that descriptor, which does not block; none: it is closed for ever.
    pub fn new(fd: Option<OwnedFd>, is_once: bool) -> Self {
        Self { fd, held: Vec::new(), is_closing: false, is_once }
    }

    /// Whether something may still be written.
    pub fn is_open(&self) -> bool {
        self.fd.is_some() && !self.is_closing
    }

    /// Whether clients are read from now.
    pub fn has_room(&self) -> bool {
        self.is_open() && self.held.is_empty()
    }

    /// The descriptor, and whether bytes wait for it.
    pub fn waits(&self) -> Option<(BorrowedFd<'_>, bool)> {
        self.fd.as_ref().map(|fd| (fd.as_fd(), !self.held.is_empty()))
    }

    /// Passes on what a client wrote.
    pub fn write(&mut self, bytes: &[u8]) {
        if self.is_open() {
            self.held.extend_from_slice(bytes);
            self.flush();
        }
    }

    /// Passes on what waits.
    pub fn flush(&mut self) {
        let Some(fd) = &self.fd else { return };
        while !self.held.is_empty() {
            match rustix::io::write(fd, &self.held) {
                Ok(count) => drop(self.held.drain(..count.min(self.held.len()))),
                Err(Errno::AGAIN | Errno::INTR) => return,
                Err(_) => return self.closed(),
            }
        }
        if self.is_closing {
            self.closed();
        }
    }

    /// Closes it once everything was passed on.
    pub fn close(&mut self) {
        self.is_closing = true;
        self.flush();
    }

    /// The container has closed its side, or has ended.
    pub fn closed(&mut self) {
        self.fd = None;
        self.held = Vec::new();
    }
}
