//! Throttled disk usage count of what containers write: writable layers and image volumes. Blocking.
//!
//! In large trees the walk sleeps as long as it works, up to a limit, so that other users of the disk are not delayed.

use std::{
    io,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use berth_sys::disk_walk;

/// Entries between two pauses; smaller trees are counted without one.
const STRETCH: u64 = 4096;
/// Maximum pause.
const LONGEST_REST: Duration = Duration::from_millis(200);

/// Bytes (in blocks) and inodes below a directory, including itself; hard links count once. Entries that vanish during
/// the walk are not counted.
///
/// # Errors
/// As [`disk_walk::count`].
pub fn count(directory: &Path) -> io::Result<(u64, u64)> {
    let (mut begun, mut seen) = (Instant::now(), 0_u64);
    let usage = disk_walk::count(directory, || {
        seen = seen.wrapping_add(1);
        if seen.is_multiple_of(STRETCH) {
            thread::sleep(begun.elapsed().min(LONGEST_REST));
            begun = Instant::now();
        }
        Ok(())
    })?;
    Ok((usage.bytes, usage.inodes))
}
