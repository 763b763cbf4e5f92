//! Volume record (`vol_data.json`) for teardown by a later agent. Blocking. Implements spec 07 §1, §17.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use rustix::fs::OFlags;

use super::paths::RECORD;
use berth_sys::atomic_file;

/// Maximum size of a record in bytes.
const LONGEST: u64 = 64 << 10;
/// Mode of the record file.
const MODE: u32 = 0o644;

/// Lifecycle mode of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lifecycle {
    /// Independent of any pod.
    Persistent,
    /// Ends with its pod.
    Ephemeral,
}

impl Lifecycle {
    /// Returns the API spelling.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Persistent => "Persistent",
            Self::Ephemeral => "Ephemeral",
        }
    }
}

/// Content of a record. Fields that a record does not have are empty.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CsiVolumeRecord {
    /// Name of the driver.
    pub driver: String,
    /// Volume handle of the driver.
    pub handle: String,
    /// Name of the volume's spec.
    pub spec: String,
    /// Name of the node.
    pub node: String,
    /// Name of the `VolumeAttachment`.
    pub attachment: String,
    /// Lifecycle mode; `None` if not recorded.
    pub lifecycle: Option<Lifecycle>,
    /// SELinux label of the mount; empty for none.
    pub label: String,
}

impl CsiVolumeRecord {
    /// Reads the record of a directory; `None` if there is none.
    ///
    /// # Errors
    /// If the record cannot be read or lacks driver and handle.
    pub fn read(directory: &Path) -> io::Result<Option<Self>> {
        let flags = i32::try_from(OFlags::NONBLOCK.bits() | OFlags::NOFOLLOW.bits()).unwrap_or(0);
        let file = match OpenOptions::new().read(true).custom_flags(flags).open(directory.join(RECORD)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        let mut text = Vec::new();
        File::take(file, LONGEST).read_to_end(&mut text)?;
        Self::parse(&text).map(Some)
    }

    fn parse(text: &[u8]) -> io::Result<Self> {
        let mut fields: BTreeMap<String, String> = serde_json::from_slice(text)?;
        let mut field = |name: &str| fields.remove(name).unwrap_or_default();
        let lifecycle = match field("volumeLifecycleMode").as_str() {
            "Persistent" => Some(Lifecycle::Persistent),
            "Ephemeral" => Some(Lifecycle::Ephemeral),
            _ => None,
        };
        let record = Self {
            driver: field("driverName"),
            handle: field("volumeHandle"),
            spec: field("specVolID"),
            node: field("nodeName"),
            attachment: field("attachmentID"),
            label: field("seLinuxMountContext"),
            lifecycle,
        };
        if record.driver.is_empty() || record.handle.is_empty() {
            return Err(io::Error::other("driverName or volumeHandle is missing"));
        }
        Ok(record)
    }

    /// Returns the JSON text with sorted keys.
    fn text(&self) -> String {
        let lifecycle = self.lifecycle.map_or("", Lifecycle::as_str);
        let fields: BTreeMap<&str, &str> = [
            ("driverName", self.driver.as_str()),
            ("volumeHandle", &self.handle),
            ("specVolID", &self.spec),
            ("nodeName", &self.node),
            ("attachmentID", &self.attachment),
            ("seLinuxMountContext", &self.label),
            ("volumeLifecycleMode", lifecycle),
        ]
        .into_iter()
        .filter(|(_, value)| !value.is_empty())
        .collect();
        format!("{}\n", serde_json::json!(fields))
    }

    /// Writes the record atomically; an equal one stays unchanged.
    ///
    /// # Errors
    /// If the write fails; the old record then stays in place.
    pub fn write(&self, directory: &Path) -> io::Result<()> {
        if matches!(Self::read(directory), Ok(Some(known)) if known == *self) {
            return Ok(());
        }
        atomic_file::replace(&directory.join(RECORD), self.text().as_bytes(), MODE)
    }

    /// Removes the record; a missing one is no error.
    ///
    /// # Errors
    /// If the record cannot be removed.
    pub fn remove(directory: &Path) -> io::Result<()> {
        match fs::remove_file(directory.join(RECORD)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full() -> CsiVolumeRecord {
        CsiVolumeRecord {
            driver: "d".to_owned(),
            handle: "h".to_owned(),
            spec: "pv".to_owned(),
            node: "n".to_owned(),
            attachment: "csi-1".to_owned(),
            lifecycle: Some(Lifecycle::Persistent),
            label: String::new(),
        }
    }

    #[test]
    fn records_are_as_others_write_them() {
        let published = concat!(
            r#"{"attachmentID":"csi-1","driverName":"d","nodeName":"n","specVolID":"pv","#,
            r#""volumeHandle":"h","volumeLifecycleMode":"Persistent"}"#,
            "\n"
        );
        assert_eq!(full().text(), published);
        let staged = CsiVolumeRecord { driver: "d".to_owned(), handle: "h".to_owned(), ..CsiVolumeRecord::default() };
        assert_eq!(staged.text(), "{\"driverName\":\"d\",\"volumeHandle\":\"h\"}\n");
        let labelled = CsiVolumeRecord { label: "u:r:t:s0:c1,c2".to_owned(), ..staged.clone() };
        let text = r#"{"driverName":"d","seLinuxMountContext":"u:r:t:s0:c1,c2","volumeHandle":"h"}"#;
        assert_eq!(labelled.text(), format!("{text}\n"));
        for record in [full(), staged, labelled] {
            assert_eq!(CsiVolumeRecord::parse(record.text().as_bytes()).expect("good"), record);
        }
    }

    #[test]
    fn a_malformed_record_is_an_error() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = directory.path();
        assert_eq!(CsiVolumeRecord::read(at).expect("readable"), None);
        for bad in ["", "{}", "[]", "{\"driverName\":\"d\"}", "{\"driverName\":1,\"volumeHandle\":\"h\"}", "\u{0}"] {
            fs::write(at.join(RECORD), bad).expect("written");
            assert!(CsiVolumeRecord::read(at).is_err(), "{bad:?}");
        }
        full().write(at).expect("written");
        assert_eq!(CsiVolumeRecord::read(at).expect("readable"), Some(full()));
        assert_eq!(fs::read_dir(at).expect("listable").count(), 1, "nothing else is left");
        CsiVolumeRecord::remove(at).expect("removed");
        CsiVolumeRecord::remove(at).expect("there is none");
        fs::create_dir(at.join(RECORD)).expect("made");
        assert!(CsiVolumeRecord::read(at).is_err(), "a directory");
    }
}
