//! The file system that writable layers lie on. Blocking.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rustix::fs::{major, minor, stat, statvfs};

/// A file system.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Volume {
    /// Its device: `/dev/vda1`; numbers where it has no name.
    pub device: String,
    /// Bytes.
    pub capacity: u64,
    /// Inodes.
    pub inodes: u64,
    /// Those that are free.
    pub inodes_free: u64,
}

/// The file system a path is on; none where the kernel does not tell.
pub fn of(path: &Path) -> Option<Volume> {
    let told = statvfs(path).ok()?;
    let device = stat(path).ok()?.st_dev;
    Some(Volume {
        device: device_name(major(device), minor(device)),
        capacity: told.f_blocks.saturating_mul(told.f_frsize),
        inodes: told.f_files,
        inodes_free: told.f_ffree,
    })
}

/// What a block device is called: `/dev/vda1`, else its numbers.
pub fn device_name(major: u32, minor: u32) -> String {
    let numbers = format!("{major}:{minor}");
    let told = fs::read_to_string(PathBuf::from("/sys/dev/block").join(&numbers).join("uevent")).unwrap_or_default();
    let name = told.lines().find_map(|line| line.strip_prefix("DEVNAME="));
    name.map_or(numbers, |name| format!("/dev/{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_is_on_one() {
        let root = of(Path::new("/")).expect("a file system");
        assert!(root.capacity > 0 && !root.device.is_empty(), "{root:?}");
        assert_eq!(of(Path::new("/nowhere/at/all")), None);
        assert_eq!(device_name(4095, 77), "4095:77");
    }
}
