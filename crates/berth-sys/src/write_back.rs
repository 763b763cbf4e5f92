//! Written pages on their way to the disk before anybody waits for them.

use std::{fs::File, os::fd::AsRawFd};

use nix::libc;

/// Has the kernel begin to write what a file holds and its disk does not. Nothing is durable for that; a file system that
/// cannot begin writes when it is synced.
pub fn begin(file: &File) {
    // SAFETY: takes a descriptor, which `file` holds open, and integers; it reads no memory of ours and changes no content.
    let _begun = unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
}
