//! Checksummed record files: JSON, then a line `#crc32c=<8 hex>` over the preceding bytes.
//!
//! A file with a wrong checksum or an unknown version makes its object *broken*, never partially known. Blocking: call
//! [`read`] and [`write()`] from the blocking pool. Implements spec 09 §6.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use berth_sys::atomic_file;

/// Value of the field `v` in every record.
pub const VERSION: u64 = 1;
/// Maximum size of a record, bytes; the read truncates a longer file, whose checksum then fails.
const LIMIT: u64 = 32 << 20;
const MARK: &[u8] = b"\n#crc32c=";
const MODE: u32 = 0o600;

/// An invalid record file.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file cannot be read.
    #[error("failed to read file")]
    Io(#[from] io::Error),
    /// The file is truncated, corrupt, or not a record.
    #[error("checksum mismatch")]
    Checksum,
    /// A different release wrote the record.
    #[error("unknown version {0}")]
    Version(u64),
    /// The checksum matches, but the content has another form.
    #[error("unexpected content")]
    Content(#[from] serde_json::Error),
}

/// Whether a record must survive a power loss.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Durability {
    /// Syncs the file and its directory.
    Synced,
    /// Does not sync: what the record describes does not survive a power loss either.
    Unsynced,
}

#[derive(Deserialize)]
struct RecordVersion {
    v: u64,
}

/// Encodes a record. The value must have a field `v` with [`VERSION`].
///
/// # Errors
/// The value has no JSON form (maps whose keys are not strings).
pub fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, serde_json::Error> {
    let mut text = serde_json::to_vec(value)?;
    let sum = crc32c(&text);
    text.extend_from_slice(MARK);
    text.extend_from_slice(format!("{sum:08x}\n").as_bytes());
    Ok(text)
}

/// Decodes a record.
///
/// # Errors
/// The checksum, the version, or the content is wrong.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, RecordError> {
    let tail = MARK.len() + 9;
    let at = bytes.len().checked_sub(tail).ok_or(RecordError::Checksum)?;
    let (text, end) = bytes.split_at(at);
    let sum = end.strip_prefix(MARK).and_then(|rest| rest.strip_suffix(b"\n")).ok_or(RecordError::Checksum)?;
    if sum != format!("{:08x}", crc32c(text)).as_bytes() {
        return Err(RecordError::Checksum);
    }
    let RecordVersion { v } = serde_json::from_slice(text)?;
    if v != VERSION {
        return Err(RecordError::Version(v));
    }
    Ok(serde_json::from_slice(text)?)
}

/// Reads a record from a file; `None` if the file does not exist.
///
/// # Errors
/// The record is [`RecordError`].
pub fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, RecordError> {
    let file = match File::open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    let mut bytes = Vec::new();
    file.take(LIMIT).read_to_end(&mut bytes)?;
    decode(&bytes).map(Some)
}

/// Replaces the record in a file atomically: either the old or the new one exists at any time.
///
/// # Errors
/// The write fails.
pub fn write<T: Serialize>(path: &Path, value: &T, durability: Durability) -> io::Result<()> {
    let bytes = encode(value)?;
    match durability {
        Durability::Synced => atomic_file::replace(path, &bytes, MODE),
        Durability::Unsynced => atomic_file::replace_unsynced(path, &bytes, MODE),
    }
}

/// CRC-32C (Castagnoli) checksum.
pub fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |sum, byte| (sum >> 8) ^ TABLE[usize::from((sum as u8) ^ byte)])
}

const TABLE: [u32; 256] = {
    let mut table = [0u32; 256];
    let mut i = 0;
    while i < 256 {
        let mut value = i as u32;
        let mut bit = 0;
        while bit < 8 {
            value = if value & 1 == 1 { (value >> 1) ^ 0x82f6_3b78 } else { value >> 1 };
            bit += 1;
        }
        table[i] = value;
        i += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Thing {
        v: u64,
        name: String,
    }

    fn thing(v: u64) -> Thing {
        Thing { v, name: "a\n#crc32c=00000000\n".into() }
    }

    #[test]
    fn the_sum_is_the_published_one() {
        // RFC 3720 B.4
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0u8; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(b""), 0);
    }

    #[test]
    fn what_was_written_is_read() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("meta.json");
        assert!(read::<Thing>(&path).expect("no file").is_none());
        for durability in [Durability::Synced, Durability::Unsynced] {
            write(&path, &thing(1), durability).expect("writable");
            assert_eq!(read::<Thing>(&path).expect("whole"), Some(thing(1)));
        }
    }

    #[test]
    fn what_is_not_whole_is_broken() {
        let whole = encode(&thing(1)).expect("encodable");
        for length in 0..whole.len() {
            assert!(decode::<Thing>(&whole[..length]).is_err(), "cut at {length}");
        }
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            assert!(decode::<Thing>(&changed).is_err(), "changed at {at}");
        }
        let newer = encode(&thing(2)).expect("encodable");
        assert!(matches!(decode::<Thing>(&newer), Err(RecordError::Version(2))));
        let other = encode(&serde_json::json!({"v": 1})).expect("encodable");
        assert!(matches!(decode::<Thing>(&other), Err(RecordError::Content(_))));
    }
}
