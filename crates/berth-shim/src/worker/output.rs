//! Output stream of a container: non-blocking reads, split into log records.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

use super::log_record::{Splitter, Tag};

/// The shim's end of a stream, with the incomplete line.
#[derive(Debug)]
pub struct OutputStream {
    fd: OwnedFd,
    splitter: Splitter,
}

/// Data, end of file, or nothing to read yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadResult {
    /// This many bytes were read.
    Some(usize),
    /// No data at present.
    Nothing,
    /// End of the stream.
    End,
}

impl OutputStream {
    /// Output over a non-blocking descriptor.
    pub fn new(fd: OwnedFd, longest_record: usize) -> Self {
        Self { fd, splitter: Splitter::new(longest_record) }
    }

    /// Descriptor of the stream.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Reads once.
    pub fn read(&self, buffer: &mut [u8]) -> ReadResult {
        match rustix::io::read(&self.fd, buffer) {
            Ok(0) => ReadResult::End,
            Ok(count) => ReadResult::Some(count),
            Err(Errno::AGAIN | Errno::INTR) => ReadResult::Nothing,
            Err(_) => ReadResult::End, // EIO: no process has the terminal open
        }
    }

    /// Splits read bytes into records.
    pub fn split(&mut self, bytes: &[u8], out: &mut dyn FnMut(Tag, &[u8])) {
        self.splitter.feed(bytes, out);
    }

    /// Passes on the remaining bytes at the end of the stream.
    pub fn finish(mut self, out: &mut dyn FnMut(Tag, &[u8])) {
        self.splitter.finish(out);
    }
}
