//! Block devices in sysfs: links, iSCSI sessions, multipath devices, scan, and deletion of disks.
//!
//! Blocking; reads `/sys` and the udev links below `/dev/disk`. Implements spec 07 §7.8.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

/// Maximum bytes used of a `/sys` file.
const LONGEST: usize = 4096;
/// Whether a disk name has only safe characters: it becomes part of paths.
fn is_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_!.:".contains(&b)) && !name.contains("..")
}

/// Link directory below `/dev/disk`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Links {
    /// `by-path`: named after the transport path.
    ByPath,
    /// `by-id`: named after the disk's identity.
    ById,
}

/// Access to the kernel's block devices.
#[derive(Clone, Debug)]
pub struct ScsiDisks {
    sys: PathBuf,
    dev: PathBuf,
}

impl Default for ScsiDisks {
    fn default() -> Self {
        Self::below(Path::new("/"))
    }
}

/// Returns the sorted entry names of a directory; none if it does not exist.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut all: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    all.sort();
    all
}

fn text(file: &Path) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    Some(berth_types::cut_at_char(text.trim(), LONGEST).to_owned())
}

/// iSCSI session of an initiator with a target.
struct Session {
    /// Number of its SCSI host.
    host: u32,
    path: PathBuf,
}

impl ScsiDisks {
    /// Uses `sys` and `dev` below that root instead of `/`.
    pub fn below(root: &Path) -> Self {
        Self { sys: root.join("sys"), dev: root.join("dev") }
    }

    fn folder(&self, links: Links) -> PathBuf {
        self.dev.join("disk").join(match links {
            Links::ByPath => "by-path",
            Links::ById => "by-id",
        })
    }

    /// Returns the paths of links with matching names. Omits links whose device does not exist.
    pub fn links(&self, links: Links, fits: impl Fn(&str) -> bool) -> Vec<PathBuf> {
        let folder = self.folder(links);
        let fitting = names(&folder).into_iter().filter(|name| fits(name)).map(|name| folder.join(name));
        fitting.filter(|link| self.disk(link).is_some()).collect()
    }

    /// Returns the name of the disk behind a path, such as `sdb`; `None` if there is none.
    pub fn disk(&self, path: &Path) -> Option<String> {
        let real = fs::canonicalize(path).ok()?;
        let name = real.file_name()?.to_str()?;
        is_name(name).then(|| name.to_owned())
    }

    /// Returns the device path of a disk.
    pub fn device(&self, disk: &str) -> PathBuf {
        self.dev.join(disk)
    }

    /// Returns the multipath device that has the disk as a path, such as `dm-0`.
    pub fn multipath(&self, disk: &str) -> Option<String> {
        let blocks = self.sys.join("block");
        let holds = |name: &String| {
            let own = blocks.join(name);
            // Other device-mapper devices may use a disk too, such as an encrypted or a logical volume.
            let kind = text(&own.join("dm/uuid"));
            name.starts_with("dm-")
                && own.join("slaves").join(disk).symlink_metadata().is_ok()
                && kind.is_none_or(|kind| kind.is_empty() || kind.starts_with("mpath-"))
        };
        names(&blocks).into_iter().find(holds)
    }

    /// Returns the disks of a multipath device.
    pub fn multipath_members(&self, multipath: &str) -> Vec<String> {
        names(&self.sys.join("block").join(multipath).join("slaves"))
    }

    /// Makes every SCSI host scan for new disks.
    pub fn rescan(&self) {
        let hosts = self.sys.join("class/scsi_host");
        for host in names(&hosts) {
            // A host that cannot be scanned finds nothing.
            if let Err(error) = write(&hosts.join(&host).join("scan"), "- - -") {
                tracing::debug!(%host, err = %error, "Failed to rescan SCSI host");
            }
        }
    }

    /// Makes one SCSI host scan for one LUN only.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn scan(&self, host: u32, lun: i32) -> io::Result<()> {
        write(&self.sys.join(format!("class/scsi_host/host{host}/scan")), &format!("0 0 {lun}"))
    }

    /// Deletes a disk from the kernel; a missing one is no error.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn delete(&self, disk: &str) -> io::Result<()> {
        let file = self.sys.join("block").join(disk).join("device/delete");
        match write(&file, "1") {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    fn sessions(&self, iqn: &str) -> Vec<Session> {
        let hosts = self.sys.join("class/iscsi_host");
        let mut found = Vec::new();
        for name in names(&hosts) {
            let Some(host) = name.strip_prefix("host").and_then(|number| number.parse().ok()) else { continue };
            let device = hosts.join(&name).join("device");
            for session in names(&device).into_iter().filter(|name| name.starts_with("session")) {
                let path = device.join(&session);
                let target = text(&path.join("iscsi_session").join(&session).join("targetname"));
                if target.as_deref() == Some(iqn) {
                    found.push(Session { host, path });
                }
            }
        }
        found
    }

    /// Returns the SCSI hosts of the sessions with a target, by portal: both by the current address and by the
    /// configured (persistent) one.
    pub fn portals(&self, iqn: &str) -> BTreeMap<String, u32> {
        let mut found = BTreeMap::new();
        for session in self.sessions(iqn) {
            for connection in names(&session.path).into_iter().filter(|name| name.starts_with("connection")) {
                let own = session.path.join(&connection).join("iscsi_connection").join(&connection);
                for (address, port) in [("address", "port"), ("persistent_address", "persistent_port")] {
                    let (address, port) = (text(&own.join(address)), text(&own.join(port)));
                    if let (Some(address), Some(port)) = (address, port) {
                        let address = if address.contains(':') { format!("[{address}]") } else { address };
                        found.insert(format!("{address}:{port}"), session.host);
                    }
                }
            }
        }
        found
    }

    /// Returns the disks of a LUN, one per session.
    pub fn units(&self, iqn: &str, lun: i32) -> Vec<String> {
        let mut found = Vec::new();
        for session in self.sessions(iqn) {
            for target in names(&session.path).into_iter().filter(|name| name.starts_with("target")) {
                let own = session.path.join(&target);
                let of_unit = |name: &String| name.rsplit(':').next().is_some_and(|last| last == lun.to_string());
                for unit in names(&own).into_iter().filter(|name| name.matches(':').count() == 3).filter(of_unit) {
                    found.extend(names(&own.join(unit).join("block")).into_iter().filter(|name| is_name(name)));
                }
            }
        }
        found
    }
}

/// Writes to an existing file, because files in `/sys` cannot be created.
fn write(file: &Path, text: &str) -> io::Result<()> {
    use io::Write;
    fs::OpenOptions::new().write(true).open(file)?.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::testing::{disk, session};

    #[test]
    fn disks_are_found_by_their_links() {
        let root = tempfile::tempdir().expect("a directory");
        let blocks = ScsiDisks::below(root.path());
        assert!(blocks.links(Links::ByPath, |_| true).is_empty());
        disk(root.path(), "sdb", &["by-path/fc-0x5-lun-0", "by-id/scsi-36"]);
        let links = blocks.links(Links::ByPath, |name| name == "fc-0x5-lun-0");
        let [link] = links.as_slice() else { panic!("{links:?}") };
        assert_eq!(blocks.disk(link).as_deref(), Some("sdb"));
        assert_eq!(blocks.disk(&blocks.device("sdb")).as_deref(), Some("sdb"));
        assert_eq!(blocks.links(Links::ById, |name| name == "scsi-36").len(), 1);
        // udev has not removed the link yet.
        fs::remove_file(blocks.device("sdb")).expect("removed");
        assert_eq!(blocks.disk(link), None);
        assert!(blocks.links(Links::ById, |_| true).is_empty());
    }

    #[test]
    fn a_multipath_device_is_distinguished_from_other_holders_of_a_disk() {
        let root = tempfile::tempdir().expect("a directory");
        let blocks = ScsiDisks::below(root.path());
        let make = |name: &str, kind: Option<&str>, disks: &[&str]| {
            let own = root.path().join("sys/block").join(name);
            fs::create_dir_all(own.join("slaves")).expect("made");
            fs::create_dir_all(own.join("dm")).expect("made");
            if let Some(kind) = kind {
                fs::write(own.join("dm/uuid"), kind).expect("written");
            }
            disks.iter().for_each(|disk| symlink("../..", own.join("slaves").join(disk)).expect("linked"));
        };
        make("dm-0", Some("CRYPT-LUKS2-x\n"), &["sda"]);
        make("dm-1", Some("mpath-3600\n"), &["sda", "sdb"]);
        make("dm-2", None, &["sdc"]);
        make("sdx", Some("mpath-3600\n"), &["sdd"]);
        for (disk, expected) in [("sda", Some("dm-1")), ("sdb", Some("dm-1")), ("sdc", Some("dm-2")), ("sdd", None)] {
            assert_eq!(blocks.multipath(disk).as_deref(), expected, "{disk}");
        }
        assert_eq!(blocks.multipath_members("dm-1"), ["sda", "sdb"]);
    }

    #[test]
    fn sessions_give_the_portals_and_disks_of_a_target() {
        let root = tempfile::tempdir().expect("a directory");
        let blocks = ScsiDisks::below(root.path());
        session(root.path(), 3, "iqn.a", "10.0.0.1", &[(0, "sdb"), (10, "sdc")]);
        session(root.path(), 4, "iqn.a", "fd00::1", &[(0, "sdd")]);
        session(root.path(), 5, "iqn.b", "10.0.0.1", &[(0, "sde")]);
        let portals = blocks.portals("iqn.a");
        assert_eq!(portals.get("10.0.0.1:3260"), Some(&3));
        assert_eq!(portals.get("[fd00::1]:3260"), Some(&4));
        assert_eq!(portals.len(), 2);
        assert_eq!(blocks.units("iqn.a", 0), ["sdb", "sdd"]);
        assert_eq!(blocks.units("iqn.a", 10), ["sdc"]);
        assert!(blocks.units("iqn.a", 1).is_empty() && blocks.portals("iqn.c").is_empty());
    }

    #[test]
    fn scans_and_deletions_are_written_to_sysfs() {
        let root = tempfile::tempdir().expect("a directory");
        let blocks = ScsiDisks::below(root.path());
        session(root.path(), 3, "iqn.a", "10.0.0.1", &[(0, "sdb")]);
        disk(root.path(), "sdb", &[]);
        let read = |path: &str| fs::read_to_string(root.path().join("sys").join(path)).expect("readable");
        blocks.scan(3, 7).expect("scanned");
        assert_eq!(read("class/scsi_host/host3/scan"), "0 0 7");
        blocks.rescan();
        assert!(read("class/scsi_host/host3/scan").starts_with("- - -"));
        blocks.scan(9, 7).expect_err("no such host");
        blocks.delete("sdb").expect("forgotten");
        assert_eq!(read("block/sdb/device/delete"), "1");
        blocks.delete("sdz").expect("not there");
    }
}
