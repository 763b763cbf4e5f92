//! Log statistics of a shim in a shared file, read by the agent without a request.
//!
//! `log.tally` in a shim's directory: three 64-bit integers, overwritten in place at most once a second. It is in
//! memory (the directory is on tmpfs), and created on the first write to a log. Implements spec 09 §13.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
};

/// Name of the file in a shim's directory.
const FILE: &str = "log.tally";
/// Size of the file, bytes.
const LENGTH: usize = 24;

/// Log write statistics.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LogTally {
    /// Bytes written.
    pub bytes: u64,
    /// Records dropped.
    pub dropped: u64,
    /// Errors of writing and of reopening a log.
    pub errors: u64,
}

impl LogTally {
    /// Saturating sum.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_add(other.bytes),
            dropped: self.dropped.saturating_add(other.dropped),
            errors: self.errors.saturating_add(other.errors),
        }
    }

    fn encoded(self) -> [u8; LENGTH] {
        let mut out = [0; LENGTH];
        for (place, value) in out.chunks_exact_mut(8).zip([self.bytes, self.dropped, self.errors]) {
            place.copy_from_slice(&value.to_le_bytes());
        }
        out
    }

    fn decoded(bytes: &[u8]) -> Option<Self> {
        let (numbers, []) = bytes.as_chunks::<8>() else { return None };
        match *numbers {
            [bytes, dropped, errors] => Some(Self {
                bytes: u64::from_le_bytes(bytes),
                dropped: u64::from_le_bytes(dropped),
                errors: u64::from_le_bytes(errors),
            }),
            _ => None,
        }
    }

    /// Last statistics published by the shim of that directory; zeros if there are none.
    pub fn read(folder: &Path) -> Self {
        fs::read(folder.join(FILE)).ok().and_then(|bytes| Self::decoded(&bytes)).unwrap_or_default()
    }
}

/// Publisher of the statistics in the shim.
#[derive(Debug, Default)]
pub struct TallyWriter {
    file: Option<File>,
}

impl TallyWriter {
    /// Replaces the published statistics.
    ///
    /// # Errors
    /// The file system's error.
    pub fn publish(&mut self, folder: &Path, tally: LogTally) -> io::Result<()> {
        let file = match &self.file {
            Some(file) => file,
            None => {
                let path = folder.join(FILE);
                let made = fs::OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
                self.file.insert(made)
            }
        };
        file.write_all_at(&tally.encoded(), 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_statistics_are_read_back() {
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(LogTally::read(folder.path()), LogTally::default());
        let mut writer = TallyWriter::default();
        for bytes in [7, u64::MAX] {
            let tally = LogTally { bytes, dropped: 1, errors: 2 };
            writer.publish(folder.path(), tally).expect("written");
            assert_eq!(LogTally::read(folder.path()), tally);
        }
        fs::write(folder.path().join(FILE), "short").expect("written");
        assert_eq!(LogTally::read(folder.path()), LogTally::default());
    }
}
