//! Fibre Channel disks of volumes, with their directory and link names. Pure.
//!
//! Implements spec 07 §1, §2.1, §7.8.

use std::path::{Path, PathBuf};

use crate::spec::{Mode, VolumeSpec};
use berth_types::api;

/// Plugin name, which is part of paths.
pub const PLUGIN: &str = "kubernetes.io/fc";
/// Maximum names of one disk; real disks have fewer paths.
const MOST: usize = 32;

/// Identification of a disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Disk {
    /// By target ports and LUN.
    Lun {
        /// World wide names of the target ports.
        wwns: Vec<String>,
        /// Logical unit number.
        lun: i32,
    },
    /// By world wide identifiers of the disk itself.
    Ids(Vec<String>),
}

/// Whether the text may be part of a path.
fn is_plain(part: &str) -> bool {
    !part.is_empty() && !part.contains(['/', '\0', '\n']) && part != "." && part != ".."
}

impl Disk {
    /// Returns the disk of a volume source.
    ///
    /// # Errors
    /// If the source names no disk, or has an invalid or excessive number of names.
    pub fn of(source: &api::FCVolumeSource) -> Result<Self, String> {
        let (wwns, wwids) = (source.target_wwns.clone().unwrap_or_default(), source.wwids.clone().unwrap_or_default());
        if wwns.len() > MOST || wwids.len() > MOST {
            return Err(format!("fc: more than {MOST} WWNs or WWIDs for one disk"));
        }
        if let Some(odd) = wwns.iter().chain(&wwids).find(|name| !is_plain(name)) {
            return Err(format!("fc: invalid WWN or WWID {odd:?}: cannot be used in a path"));
        }
        match (wwns.is_empty(), source.lun, wwids.is_empty()) {
            (false, Some(lun), _) => Ok(Self::Lun { wwns, lun }),
            (_, _, false) => Ok(Self::Ids(wwids)),
            _ => Err("fc: no fc disk information found. failed to make a new mounter".to_owned()),
        }
    }

    /// Returns a volume source for this disk.
    pub fn source(&self) -> api::FCVolumeSource {
        let (wwns, lun, wwids) = match self.clone() {
            Self::Lun { wwns, lun } => (Some(wwns), Some(lun), None),
            Self::Ids(ids) => (None, None, Some(ids)),
        };
        api::FCVolumeSource { target_wwns: wwns, lun, wwids, ..api::FCVolumeSource::default() }
    }

    /// Returns the volume name that the attach/detach controller uses.
    pub fn name(&self) -> String {
        match self {
            Self::Lun { wwns, lun } => format!("[{}]:{lun}", wwns.join(" ")),
            Self::Ids(ids) => format!("[{}]", ids.join(" ")),
        }
    }

    /// Returns the directory of the mount shared by all pods of the node.
    pub fn directory(&self, root: &Path, mode: Mode) -> PathBuf {
        base(root, mode).join(match self {
            Self::Lun { wwns, lun } => format!("{}-lun-{lun}", wwns.join("-")),
            Self::Ids(ids) => ids.join("-"),
        })
    }

    /// Parses the path of a disk directory; `None` if it is not one.
    pub fn by_path(directory: &Path) -> Option<Self> {
        let name = directory.file_name()?.to_str()?;
        let parts = |text: &str| -> Vec<String> { text.split('-').map(str::to_owned).collect() };
        match name.rsplit_once("-lun-") {
            Some((wwns, lun)) if !wwns.is_empty() => Some(Self::Lun { wwns: parts(wwns), lun: lun.parse().ok()? }),
            Some(_) => None,
            None if name.is_empty() || name == "volumeDevices" => None,
            None => Some(Self::Ids(parts(name))),
        }
    }

    /// Whether a link in `/dev/disk/by-path` (for a LUN) or `by-id` (for identifiers) belongs to the disk.
    pub fn is_named(&self, link: &str) -> bool {
        match self {
            Self::Lun { wwns, lun } => wwns.iter().any(|wwn| {
                let end = format!("fc-0x{wwn}-lun-{lun}");
                link == end || link.strip_prefix("pci-").is_some_and(|rest| rest.ends_with(&format!("-{end}")))
            }),
            // udev replaces blanks in vendor names by underscores.
            Self::Ids(ids) => ids
                .iter()
                .any(|id| link.strip_prefix("scsi-").is_some_and(|rest| rest == id || rest == id.replace(' ', "_"))),
        }
    }
}

/// Returns the disk of a volume, and its file system type.
///
/// # Errors
/// If the volume names no valid disk.
pub fn of(spec: &VolumeSpec) -> Result<(Disk, Option<String>), String> {
    let source = spec.as_inline().and_then(|volume| volume.fc.as_ref()).or_else(|| spec.volume()?.fc.as_ref());
    let source = source.ok_or("spec does not reference a FibreChannel volume type")?;
    Ok((Disk::of(source)?, source.fs_type.clone()))
}

/// Returns the parent of all disk directories.
pub fn base(root: &Path, mode: Mode) -> PathBuf {
    let own = root.join("plugins").join(PLUGIN);
    if mode == Mode::Block { own.join("volumeDevices") } else { own }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn disk(source: serde_json::Value) -> Result<Disk, String> {
        Disk::of(&serde_json::from_value(source).expect("a source"))
    }

    #[test]
    fn a_disk_has_a_name_and_a_directory() {
        for (source, name, directory) in [
            (
                json!({"targetWWNs": ["50060e80", "50060e81"], "lun": 2}),
                "[50060e80 50060e81]:2",
                "50060e80-50060e81-lun-2",
            ),
            (json!({"targetWWNs": ["5"], "lun": 0, "wwids": ["36"]}), "[5]:0", "5-lun-0"),
            (json!({"wwids": ["3600508b400105e21"]}), "[3600508b400105e21]", "3600508b400105e21"),
            (json!({"wwids": ["36", "37"]}), "[36 37]", "36-37"),
        ] {
            let disk = disk(source).expect("a disk");
            assert_eq!(disk.name(), name);
            let shared = disk.directory(Path::new("/k"), Mode::Filesystem);
            assert_eq!(shared, Path::new("/k/plugins/kubernetes.io/fc").join(directory));
            let device = disk.directory(Path::new("/k"), Mode::Block);
            assert_eq!(device, Path::new("/k/plugins/kubernetes.io/fc/volumeDevices").join(directory));
            assert_eq!(Disk::by_path(&shared), Some(disk.clone()));
            assert_eq!(Disk::of(&disk.source()), Ok(disk));
        }
    }

    #[test]
    fn what_names_no_disk_is_refused() {
        for source in [
            json!({}),
            json!({"targetWWNs": ["5"]}),
            json!({"lun": 1}),
            json!({"wwids": ["../x"]}),
            json!({"wwids": [".."]}),
            json!({"wwids": [""]}),
            json!({"targetWWNs": vec!["5"; 33], "lun": 0}),
        ] {
            disk(source.clone()).expect_err(&source.to_string());
        }
        for path in ["/-lun-1", "/5-lun-x", "/volumeDevices", "/"] {
            assert_eq!(Disk::by_path(Path::new(path)), None, "{path}");
        }
    }

    #[test]
    fn links_lead_to_disks() {
        let unit = disk(json!({"targetWWNs": ["5006", "5007"], "lun": 1})).expect("a disk");
        let itself = disk(json!({"wwids": ["3600", "ACME disk 1"]})).expect("a disk");
        for (disk, link, expected) in [
            (&unit, "fc-0x5006-lun-1", true),
            (&unit, "pci-0000:05:00.0-fc-0x5007-lun-1", true),
            (&unit, "pci-0000:05:00.0-fc-0x5007-lun-10", false),
            (&unit, "pci-0000:05:00.0-fc-0x5007-lun-1-part1", false),
            (&unit, "pci-0000:05:00.0-fc-0x15006-lun-1", false),
            (&unit, "xfc-0x5006-lun-1", false),
            (&itself, "scsi-3600", true),
            (&itself, "scsi-ACME_disk_1", true),
            (&itself, "wwn-0x3600", false),
            (&itself, "scsi-3600-part1", false),
        ] {
            assert_eq!(disk.is_named(link), expected, "{link}");
        }
    }
}
