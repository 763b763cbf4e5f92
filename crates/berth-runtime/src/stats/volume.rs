//! File system of writable layers: device, capacity, and inodes. Blocking.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rustix::fs::{major, minor, stat, statvfs};

/// A file system.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Volume {
    /// Device such as `/dev/vda1`; its numbers where it has no name.
    pub device: String,
    /// Capacity in bytes.
    pub capacity: u64,
    /// Total number of inodes.
    pub inodes: u64,
    /// Number of free inodes.
    pub inodes_free: u64,
}

/// The file system that contains a path; `None` where the kernel rejects the request.
pub fn of(path: &Path) -> Option<Volume> {
    let filesystem = statvfs(path).ok()?;
    let device = stat(path).ok()?.st_dev;
    Some(Volume {
        device: device_name(major(device), minor(device)),
        capacity: filesystem.f_blocks.saturating_mul(filesystem.f_frsize),
        inodes: filesystem.f_files,
        inodes_free: filesystem.f_ffree,
    })
}

/// Name of a block device such as `/dev/vda1`, else its numbers.
pub fn device_name(major: u32, minor: u32) -> String {
    let numbers = format!("{major}:{minor}");
    let uevent = fs::read_to_string(PathBuf::from("/sys/dev/block").join(&numbers).join("uevent")).unwrap_or_default();
    let name = uevent.lines().find_map(|line| line.strip_prefix("DEVNAME="));
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
