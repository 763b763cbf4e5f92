//! `vol_data.json`: what a volume is, for whoever has to undo it. Blocking. Spec 07 §1, §17.

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

/// What is longer is no record.
const LONGEST: u64 = 64 << 10;
/// Its mode.
const MODE: u32 = 0o644;

/// How long a volume lives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lifecycle {
    /// As long as somebody wants it.
    Persistent,
    /// As long as its pod.
    Ephemeral,
}

impl Lifecycle {
    /// As the API spells it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Persistent => "Persistent",
            Self::Ephemeral => "Ephemeral",
        }
    }
}

/// What is kept of a volume. Fields that a kind of record does not have are empty.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Record {
    /// The driver.
    pub driver: String,
    /// What it calls the volume.
    pub handle: String,
    /// The name of the volume's spec.
    pub spec: String,
    /// The node.
    pub node: String,
    /// The object that says that it is attached.
    pub attachment: String,
    /// How long it lives; `None` where that is not kept.
    pub lifecycle: Option<Lifecycle>,
    /// The label of SELinux that it is mounted with; empty for none.
    pub label: String,
}

impl Record {
    /// The record beside a mount; `None` where there is none.
    ///
    /// # Errors
    /// It cannot be read, or says nothing.
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
            return Err(io::Error::other("driverName and volumeHandle are missing"));
        }
        Ok(record)
    }

    /// The text: keys are sorted.
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

    /// Puts the record in its place; one that says the same stays as it is.
    ///
    /// # Errors
    /// The old one is in place then.
    pub fn write(&self, directory: &Path) -> io::Result<()> {
        if matches!(Self::read(directory), Ok(Some(known)) if known == *self) {
            return Ok(());
        }
        atomic_file::replace(&directory.join(RECORD), self.text().as_bytes(), MODE)
    }

    /// There is none any more.
    ///
    /// # Errors
    /// It is still there.
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

    fn full() -> Record {
        Record {
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
        let staged = Record { driver: "d".to_owned(), handle: "h".to_owned(), ..Record::default() };
        assert_eq!(staged.text(), "{\"driverName\":\"d\",\"volumeHandle\":\"h\"}\n");
        let labelled = Record { label: "u:r:t:s0:c1,c2".to_owned(), ..staged.clone() };
        let text = r#"{"driverName":"d","seLinuxMountContext":"u:r:t:s0:c1,c2","volumeHandle":"h"}"#;
        assert_eq!(labelled.text(), format!("{text}\n"));
        for record in [full(), staged, labelled] {
            assert_eq!(Record::parse(record.text().as_bytes()).expect("good"), record);
        }
    }

    #[test]
    fn what_says_nothing_is_no_record() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = directory.path();
        assert_eq!(Record::read(at).expect("readable"), None);
        for bad in ["", "{}", "[]", "{\"driverName\":\"d\"}", "{\"driverName\":1,\"volumeHandle\":\"h\"}", "\u{0}"] {
            fs::write(at.join(RECORD), bad).expect("written");
            assert!(Record::read(at).is_err(), "{bad:?}");
        }
        full().write(at).expect("written");
        assert_eq!(Record::read(at).expect("readable"), Some(full()));
        assert_eq!(fs::read_dir(at).expect("listable").count(), 1, "nothing else is left");
        Record::remove(at).expect("removed");
        Record::remove(at).expect("there is none");
        fs::create_dir(at.join(RECORD)).expect("made");
        assert!(Record::read(at).is_err(), "a directory");
    }
}
