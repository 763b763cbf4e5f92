//! Usage of file systems (statfs) and directories (du). All functions block and may hang with the disk.
//! Implements spec 04b §7.2.

use std::{
    io,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use rustix::fs::statvfs;

use berth_sys::disk_walk;
pub use berth_sys::disk_walk::Usage;

/// Directory entries between two pauses of a walk.
const BATCH: u32 = 512;
/// Length of a pause; limits a walk to about 300,000 entries per second.
const PAUSE: Duration = Duration::from_millis(1);
/// Capacity and usage of a file system, in bytes and inodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FileSystem {
    /// Total size, bytes.
    pub capacity: u64,
    /// Free bytes, including those reserved for root.
    pub free: u64,
    /// Bytes available to unprivileged users.
    pub available: u64,
    /// Total inodes.
    pub inodes: u64,
    /// Free inodes (`f_ffree`), including those reserved for root.
    pub inodes_free: u64,
}

impl FileSystem {
    /// Reads the file system that contains a path.
    ///
    /// # Errors
    /// `statvfs` failed.
    pub fn of(path: &Path) -> io::Result<Self> {
        let stat = statvfs(path)?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        Ok(Self {
            capacity: bytes(stat.f_blocks),
            free: bytes(stat.f_bfree),
            available: bytes(stat.f_bavail),
            inodes: stat.f_files,
            inodes_free: stat.f_ffree,
        })
    }

    /// Used bytes.
    pub fn used(&self) -> u64 {
        self.capacity.saturating_sub(self.free)
    }

    /// Total minus free inodes; 0 if more are free than there are.
    pub fn inodes_used(&self) -> u64 {
        self.inodes.saturating_sub(self.inodes_free)
    }
}

/// Returns a per-entry callback that pauses after each batch and aborts the walk once `stop` is set.
fn pace(stop: &AtomicBool) -> impl FnMut() -> io::Result<()> {
    let mut entries = 0;
    move || {
        entries += 1;
        if entries >= BATCH {
            entries = 0;
            thread::sleep(PAUSE);
        }
        if stop.load(Ordering::Relaxed) { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    }
}

/// Disk usage of the files directly in a directory, without subdirectories. A file deleted during the walk may or may
/// not be counted.
///
/// # Errors
/// The directory cannot be read, or `stop` was set.
pub fn files_in(directory: &Path, stop: &AtomicBool) -> io::Result<Usage> {
    disk_walk::count_files(directory, pace(stop))
}

/// Disk usage of one file.
///
/// # Errors
/// The file's metadata cannot be read.
pub fn file(path: &Path) -> io::Result<Usage> {
    disk_walk::count_file(path)
}

/// Disk usage of a directory tree, counted as by `du`.
///
/// # Errors
/// As [`disk_walk::count`], or `stop` was set.
pub fn tree(directory: &Path, stop: &AtomicBool) -> io::Result<Usage> {
    disk_walk::count(directory, pace(stop))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, process::Command};

    use super::*;

    static GO_ON: AtomicBool = AtomicBool::new(false);

    fn sample() -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path();
        fs::create_dir_all(path.join("a/b/c")).expect("made");
        fs::write(path.join("one"), vec![1; 10_000]).expect("written");
        fs::write(path.join("a/two"), vec![1; 5000]).expect("written");
        fs::write(path.join("a/b/c/three"), vec![1; 1]).expect("written");
        fs::hard_link(path.join("one"), path.join("a/again")).expect("linked");
        fs::hard_link(path.join("one"), path.join("beside")).expect("linked");
        symlink("/usr", path.join("a/elsewhere")).expect("linked");
        root
    }

    #[test]
    fn a_tree_is_counted_as_du_counts_it() {
        let root = sample();
        let usage = tree(root.path(), &GO_ON).expect("readable");
        let du = |option: &str| -> u64 {
            let out = Command::new("du").args(["-s", option]).arg(root.path()).output().expect("du runs");
            let text = String::from_utf8(out.stdout).expect("text");
            text.split_whitespace().next().and_then(|n| n.parse().ok()).expect("a number")
        };
        assert_eq!(usage.bytes, du("-B1"));
        assert_eq!(usage.inodes, du("--inodes"));
    }

    #[test]
    fn only_files_of_the_directory_itself() {
        let root = sample();
        let (flat, one) =
            (files_in(root.path(), &GO_ON).expect("readable"), file(&root.path().join("one")).expect("there"));
        assert_eq!(flat, one, "two names of one file");
        assert!(files_in(&root.path().join("absent"), &GO_ON).is_err());
        assert!(tree(&root.path().join("one"), &GO_ON).is_err(), "no directory");
        assert!(tree(&root.path().join("a/elsewhere"), &GO_ON).is_err(), "links are not followed");
    }

    #[test]
    fn a_walk_can_be_stopped() {
        let root = sample();
        let error = tree(root.path(), &AtomicBool::new(true)).expect_err("stopped");
        assert_eq!(error.kind(), io::ErrorKind::Interrupted);
    }

    #[test]
    fn a_deep_tree_needs_no_more_than_its_share_of_open_files() {
        let root = tempfile::tempdir().expect("a directory");
        let mut path = root.path().to_owned();
        for _ in 0..700 {
            path.push("d");
        }
        fs::create_dir_all(&path).expect("made");
        assert_eq!(tree(root.path(), &GO_ON).map(|u| u.inodes).expect("readable"), 701);
    }

    #[test]
    fn file_system_sizes_are_consistent() {
        let found = FileSystem::of(Path::new("/")).expect("there");
        assert!(found.capacity > 0 && found.used() <= found.capacity && found.inodes_used() <= found.inodes);
        let odd = FileSystem { capacity: 1, free: 2, inodes: 0, inodes_free: 5, ..FileSystem::default() };
        assert_eq!((odd.used(), odd.inodes_used()), (0, 0));
    }
}
