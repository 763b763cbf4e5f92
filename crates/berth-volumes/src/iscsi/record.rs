//! Record of an iSCSI login (`iscsi.json`), needed for logout. Blocking.
//!
//! Uses upstream's file format and path in the shared mount directory. The mount hides that file, so that a copy is
//! beside the directory. Implements spec 07 §1, §7.8.

use std::{
    fs::{self, DirBuilder, File},
    io::{self, Read},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::names::{self, IscsiTarget};
use crate::rebuild;
use berth_sys::atomic_file;

/// Maximum size of a record in bytes.
const LONGEST: u64 = 64 * 1024;
const FILE: &str = "iscsi.json";

/// Login record of one LUN.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct LoginRecord {
    /// Name of the volume directory.
    pub vol_name: String,
    /// All portals, with their ports.
    pub portals: Vec<String>,
    /// Name of the target.
    pub iqn: String,
    /// Logical unit number.
    pub lun: String,
    /// Existing interface from the volume spec.
    pub init_iface: String,
    /// Interface in use.
    pub iface: String,
    /// Initiator name from the volume spec; empty if the node's own is used.
    pub initiator_name: String,
    /// Portal exactly as in the volume spec. Extension of upstream's format.
    pub target_portal: String,
}

impl LoginRecord {
    /// Creates the record of a target.
    pub fn of(target: &IscsiTarget) -> Self {
        Self {
            vol_name: target.volume.clone(),
            portals: target.portals.clone(),
            iqn: target.iqn.clone(),
            lun: target.lun.to_string(),
            init_iface: target.base_interface.clone(),
            iface: target.interface.clone(),
            initiator_name: target.initiator.clone().unwrap_or_default(),
            target_portal: target.given_portal.clone(),
        }
    }

    /// Reconstructs a record from the path of its directory.
    pub fn by_path(directory: &Path) -> Option<Self> {
        let names::TargetDirectory { portal, iqn, lun, interface } = names::parse(directory)?;
        Some(Self {
            portals: vec![portal.clone()],
            iqn,
            lun: lun.to_string(),
            init_iface: interface.clone(),
            iface: interface,
            target_portal: portal,
            ..Self::default()
        })
    }

    /// Reads the record of a directory; falls back to its path.
    pub fn read(directory: &Path) -> Option<Self> {
        let read = |path: PathBuf| {
            let mut text = String::new();
            File::open(path).ok()?.take(LONGEST).read_to_string(&mut text).ok()?;
            serde_json::from_str::<Self>(&text).ok()
        };
        // The copy beside the directory first: the directory may be a mount that hangs.
        let found = beside(directory).and_then(read).or_else(|| read(directory.join(FILE)));
        let of_path = Self::by_path(directory)?;
        // A record of another program must describe the same LUN.
        let found = found.filter(|found| (&found.iqn, &found.lun) == (&of_path.iqn, &of_path.lun));
        Some(found.unwrap_or(of_path))
    }

    /// Creates the directory, and writes the record and its copy.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn write(&self, directory: &Path) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o750).create(directory)?;
        let text = serde_json::to_vec(self)?;
        for path in beside(directory).into_iter().chain([directory.join(FILE)]) {
            atomic_file::replace(&path, &text, 0o600)?;
        }
        Ok(())
    }

    /// Removes the record, its copy, and the directory, which is empty by then.
    ///
    /// # Errors
    /// The error of the system call, such as for a directory that contains data.
    pub fn remove(directory: &Path) -> io::Result<()> {
        gone(fs::remove_file(directory.join(FILE)))?;
        gone(fs::remove_dir(directory))?;
        if let Some(beside) = beside(directory) {
            gone(fs::remove_file(beside))?;
        }
        if let Some(interface) = directory.parent() {
            // Fails while directories of other targets are in it.
            let _ = fs::remove_dir(interface);
        }
        Ok(())
    }
}

fn gone(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn beside(directory: &Path) -> Option<PathBuf> {
    let name = directory.file_name()?.to_str()?;
    Some(directory.with_file_name(format!("{name}.json")))
}

/// Returns the directories of all targets below a base, recognized by their names.
///
/// # Errors
/// If a directory cannot be read.
pub fn directories(base: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for interface in rebuild::children(base)? {
        found.extend(rebuild::children(&interface)?.into_iter().filter(|path| names::parse(path).is_some()));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_outlives_its_writer() {
        let root = tempfile::tempdir().expect("a directory");
        let directory = root.path().join("iface-default/10.0.0.1:3260-iqn.x-lun-4");
        let by_path = LoginRecord::read(&directory).expect("by its path");
        assert_eq!((by_path.portals.as_slice(), by_path.lun.as_str()), (&["10.0.0.1:3260".to_owned()][..], "4"));
        let record = LoginRecord {
            portals: vec!["10.0.0.1:3260".to_owned(), "10.0.0.2:3260".to_owned()],
            target_portal: "10.0.0.1".to_owned(),
            vol_name: "v".to_owned(),
            ..by_path.clone()
        };
        record.write(&directory).expect("written");
        assert_eq!(LoginRecord::read(&directory), Some(record.clone()));
        let text = fs::read_to_string(directory.join(FILE)).expect("there");
        assert_eq!(
            text,
            "{\"VolName\":\"v\",\"Portals\":[\"10.0.0.1:3260\",\"10.0.0.2:3260\"],\"Iqn\":\"iqn.x\",\"Lun\":\"4\",\
             \"InitIface\":\"default\",\"Iface\":\"default\",\"InitiatorName\":\"\",\"TargetPortal\":\"10.0.0.1\"}"
        );
        assert_eq!(directories(root.path()).expect("read"), std::slice::from_ref(&directory));
        // Only upstream's file exists, with a field that Berth does not know.
        fs::remove_file(beside(&directory).expect("a name")).expect("removed");
        let theirs = text.replace(",\"TargetPortal\":\"10.0.0.1\"", ",\"MetricsProvider\":null");
        fs::write(directory.join(FILE), theirs).expect("written");
        assert_eq!(LoginRecord::read(&directory).map(|read| read.portals), Some(record.portals.clone()));
        // Invalid records, and those of another LUN, are ignored.
        for text in ["{", "{\"Iqn\":\"iqn.y\",\"Lun\":\"4\"}"] {
            fs::write(directory.join(FILE), text).expect("written");
            assert_eq!(LoginRecord::read(&directory), Some(by_path.clone()), "{text}");
        }
        fs::write(directory.join("data"), "precious").expect("written");
        LoginRecord::remove(&directory).expect_err("data");
        fs::remove_file(directory.join("data")).expect("removed");
        LoginRecord::remove(&directory).expect("removed");
        LoginRecord::remove(&directory).expect("nothing there");
        assert!(fs::read_dir(root.path()).expect("there").next().is_none());
    }
}
