//! How much a tree takes on its disk. Blocking, and in no hurry: counting rests as long as it works, so that a large tree
//! does not keep the disk from those who wait for it.

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// Entries between two rests; smaller trees are counted at once.
const STRETCH: u64 = 4096;
/// The longest rest.
const LONGEST_REST: Duration = Duration::from_millis(200);

/// Bytes (of blocks) and inodes below a directory, itself included; hard links count once. What vanishes meanwhile is not
/// counted.
///
/// # Errors
/// Where the directory itself cannot be looked at.
pub fn count(folder: &Path) -> io::Result<(u64, u64)> {
    let (mut bytes, mut inodes) = (0u64, 0u64);
    let mut linked = BTreeSet::new();
    let mut add = |metadata: &fs::Metadata| {
        let is_new = metadata.is_dir() || metadata.nlink() < 2 || linked.insert((metadata.dev(), metadata.ino()));
        if is_new {
            bytes = bytes.saturating_add(metadata.blocks().saturating_mul(512));
            inodes = inodes.saturating_add(1);
        }
    };
    add(&fs::symlink_metadata(folder)?);
    let (mut begun, mut seen) = (Instant::now(), 0_u64);
    let mut stack: Vec<PathBuf> = vec![folder.to_owned()];
    while let Some(folder) = stack.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries.flatten() {
            let Ok(metadata) = entry.metadata() else { continue };
            add(&metadata);
            seen = seen.wrapping_add(1);
            if seen.is_multiple_of(STRETCH) {
                thread::sleep(begun.elapsed().min(LONGEST_REST));
                begun = Instant::now();
            }
            if metadata.is_dir() {
                stack.push(entry.path());
            }
        }
    }
    Ok((bytes, inodes))
}
