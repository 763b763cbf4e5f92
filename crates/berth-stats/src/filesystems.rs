//! Mounted file systems of the node that appear in cAdvisor metrics. Blocks: statfs may hang.
//! Implements spec 04b §11 "fs_*".

use std::{collections::HashSet, fs, path::Path};

use super::{cadvisor_page::MountedFileSystem, disk::FileSystem, host};

/// File system types that are backed by a block device.
const ON_DISK: [&str; 8] = ["ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "squashfs"];
/// Maximum number of file systems in the metrics.
const MAX: usize = 256;

/// A mount that appears in the metrics.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MountEntry {
    /// Major and minor device number.
    pub numbers: (u32, u32),
    /// Mount point.
    pub target: String,
    /// Device, such as `/dev/sda1`; for tmpfs the mount point.
    pub device: String,
}

/// Returns the mounted file systems with usage and device counters. `hidden` are directories whose tmpfs mounts belong
/// to pods.
pub fn mounted(root: &Path, hidden: &[&str]) -> Vec<MountedFileSystem> {
    let table = fs::read_to_string(root.join("proc/self/mountinfo")).unwrap_or_default();
    let disks = host::disks(root);
    let mounted = places(&table, hidden).into_iter().filter_map(|place| {
        let fs = FileSystem::of(Path::new(&place.target)).ok()?;
        Some(MountedFileSystem {
            device: place.device,
            capacity: fs.capacity,
            used: fs.used(),
            inodes: fs.inodes,
            inodes_free: fs.inodes_free,
            disk: disks.get(&place.numbers).cloned(),
        })
    });
    mounted.collect()
}

/// Parses the mount table; each device appears once, with its first mount.
pub fn places(table: &str, hidden: &[&str]) -> Vec<MountEntry> {
    let mut seen = HashSet::new();
    let places = table.lines().filter_map(|line| place(line, hidden));
    places.filter(|place| seen.insert(place.device.clone())).take(MAX).collect()
}

/// Parses a line of mountinfo: `36 35 98:0 /root /target opts shared:1 - ext3 /dev/x rw`
fn place(line: &str, hidden: &[&str]) -> Option<MountEntry> {
    let (mount, kind) = line.split_once(" - ")?;
    let mut fields = mount.split(' ').skip(2);
    let (major, minor) = fields.next()?.split_once(':')?;
    let numbers = (major.parse().ok()?, minor.parse().ok()?);
    let target = fields.nth(1)?;
    // Mount points with blanks are written with escapes; they are skipped.
    if target.contains('\\') {
        return None;
    }
    let mut kind = kind.split(' ');
    let (kind, source) = (kind.next()?, kind.next()?);
    let is_hidden = || hidden.iter().any(|directory| Path::new(target).starts_with(directory));
    let device = match kind {
        "tmpfs" if !is_hidden() => target,
        disk if ON_DISK.contains(&disk) => source,
        _ => return None,
    };
    Some(MountEntry { numbers, target: target.to_owned(), device: device.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_device_is_listed_once() {
        let table = "\
25 1 259:1 / / rw - ext4 /dev/vda1 rw
26 25 0:5 / /dev rw - devtmpfs dev rw
27 25 0:20 / /dev/shm rw - tmpfs shm rw
28 25 259:1 /x /mnt/bind rw - ext4 /dev/vda1 rw
29 25 0:30 / /var/lib/kubelet/pods/u/volumes/secret rw - tmpfs tmpfs rw
30 25 0:31 / /nfs rw - nfs4 server:/x rw
31 25 8:1 / /with\\040blank rw - xfs /dev/sda1 rw
32 25 8:2 / /data rw shared:1 master:2 - xfs /dev/sda2 rw
broken
";
        let found = places(table, &["/var/lib/kubelet"]);
        let devices: Vec<&str> = found.iter().map(|place| place.device.as_str()).collect();
        assert_eq!(devices, ["/dev/vda1", "/dev/shm", "/dev/sda2"]);
        assert_eq!((found[0].numbers, found[2].target.as_str()), ((259, 1), "/data"));
    }

    #[test]
    fn this_machine_has_file_systems() {
        for found in mounted(Path::new("/"), &[]) {
            assert!(found.capacity >= found.used && !found.device.is_empty(), "{found:?}");
        }
    }
}
