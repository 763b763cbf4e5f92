//! Stdin of a container: forwards client input at the speed at which the container reads.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

/// Bytes read from clients ahead of the container.
pub const AHEAD: usize = 4096;

/// Stdin of a container.
#[derive(Debug)]
pub struct Input {
    /// The pipe, or the pty master; `None` once closed.
    fd: Option<OwnedFd>,
    buffered: Vec<u8>,
    is_closing: bool,
    /// Whether the end of the first client's input closes it (CRI `stdin_once`).
    pub is_once: bool,
}

impl Input {
    /// Stdin over this non-blocking descriptor; with `None` it is closed permanently.
    pub fn new(fd: Option<OwnedFd>, is_once: bool) -> Self {
        Self { fd, buffered: Vec::new(), is_closing: false, is_once }
    }

    /// Whether input is still accepted.
    pub fn is_open(&self) -> bool {
        self.fd.is_some() && !self.is_closing
    }

    /// Whether clients are read at present.
    pub fn has_room(&self) -> bool {
        self.is_open() && self.buffered.is_empty()
    }

    /// The descriptor, and whether bytes are buffered for it.
    pub fn waits(&self) -> Option<(BorrowedFd<'_>, bool)> {
        self.fd.as_ref().map(|fd| (fd.as_fd(), !self.buffered.is_empty()))
    }

    /// Forwards input of a client.
    pub fn write(&mut self, bytes: &[u8]) {
        if self.is_open() {
            self.buffered.extend_from_slice(bytes);
            self.flush();
        }
    }

    /// Writes buffered bytes until the descriptor would block.
    pub fn flush(&mut self) {
        let Some(fd) = &self.fd else { return };
        while !self.buffered.is_empty() {
            match rustix::io::write(fd, &self.buffered) {
                Ok(count) => drop(self.buffered.drain(..count.min(self.buffered.len()))),
                Err(Errno::AGAIN | Errno::INTR) => return,
                Err(_) => return self.closed(),
            }
        }
        if self.is_closing {
            self.closed();
        }
    }

    /// Closes the stdin once all buffered bytes are written.
    pub fn close(&mut self) {
        self.is_closing = true;
        self.flush();
    }

    /// Handles that the container has closed its end, or has exited.
    pub fn closed(&mut self) {
        self.fd = None;
        self.buffered = Vec::new();
    }
}
