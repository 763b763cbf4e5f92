//! One stream of what a container writes.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

use super::record::{Splitter, Tag};

/// The shim's end of a stream and the line that is not complete yet.
#[derive(Debug)]
pub struct Output {
    fd: OwnedFd,
    splitter: Splitter,
}

/// What reading gave.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Read {
    /// So many bytes.
    Some(usize),
    /// Nothing now.
    Nothing,
    /// Nothing ever again.
    End,
}

impl Output {
    /// Over a descriptor that does not block.
    pub fn new(fd: OwnedFd, longest_record: usize) -> Self {
        Self { fd, splitter: Splitter::new(longest_record) }
    }

    /// The descriptor.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Reads once.
    pub fn read(&self, buffer: &mut [u8]) -> Read {
        match rustix::io::read(&self.fd, buffer) {
            Ok(0) => Read::End,
            Ok(count) => Read::Some(count),
            Err(Errno::AGAIN | Errno::INTR) => Read::Nothing,
            Err(_) => Read::End, // EIO: nobody has the terminal open
        }
    }

    /// Cuts what was read into records.
    pub fn split(&mut self, bytes: &[u8], out: &mut dyn FnMut(Tag, &[u8])) {
        self.splitter.feed(bytes, out);
    }

    /// Passes on what is left at the end.
    pub fn finish(mut self, out: &mut dyn FnMut(Tag, &[u8])) {
        self.splitter.finish(out);
    }
}
