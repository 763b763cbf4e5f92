//! How much a tree takes on its disk. Blocking, and in no hurry: counting rests as long as it works, so that a large tree
//! does not keep the disk from those who wait for it.

use std::{
    io,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use berth_sys::disk_walk;

/// Entries between two rests; smaller trees are counted at once.
const STRETCH: u64 = 4096;
/// The longest rest.
const LONGEST_REST: Duration = Duration::from_millis(200);

/// Bytes (of blocks) and inodes below a directory, itself included; hard links count once. What vanishes meanwhile is not
/// counted.
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
