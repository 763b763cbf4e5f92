//! File system of writable layers: device, capacity, and inodes. Blocking.

use std::{
    fs,
    path::{Path, PathBuf},
};

use berth_cadvisor::MountedFileSystem;
use rustix::fs::{major, minor, stat, statvfs};

/// The file system that contains a path, without its usage; `None` where the kernel rejects the request.
pub fn of(path: &Path) -> Option<MountedFileSystem> {
    let file_system = statvfs(path).ok()?;
    let device = stat(path).ok()?.st_dev;
    Some(MountedFileSystem {
        device: device_name(major(device), minor(device)),
        capacity: file_system.f_blocks.saturating_mul(file_system.f_frsize),
        inodes: file_system.f_files,
        inodes_free: file_system.f_ffree,
        ..MountedFileSystem::default()
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
