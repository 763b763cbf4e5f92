//! Early write-back: starts writing dirty pages of a file before anybody waits for a sync.

use std::{fs::File, os::fd::AsRawFd};

use nix::libc;

/// Starts the write-back of a file's dirty pages. This makes nothing durable; a file system that cannot start early
/// writes on sync.
pub fn begin(file: &File) {
    // SAFETY: takes a descriptor, which `file` keeps open, and integers; it reads no memory of ours and changes no
    // content.
    let _begun = unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
}
