//! PAX extended headers: parses `<length> <key>=<value>\n` records. Pure.
//!
//! Later records override earlier ones, as in POSIX. An empty value removes an extension.

use super::{TarError, sparse};

/// Maximum number of extended attributes of an entry; the kernel accepts fewer.
const MOST_ATTRIBUTES: usize = 256;

/// Extensions of an entry; `None`: not set.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Extensions {
    /// `path`: replaces the name in the header.
    pub path: Option<Vec<u8>>,
    /// Target of a link.
    pub link: Option<Vec<u8>>,
    /// Size of the content, bytes.
    pub size: Option<u64>,
    /// User ID of the owner.
    pub uid: Option<u64>,
    /// Group ID of the owner.
    pub gid: Option<u64>,
    /// Modification time, seconds and nanoseconds since the epoch.
    pub mtime: Option<(i64, u32)>,
    /// Access time, seconds and nanoseconds since the epoch.
    pub atime: Option<(i64, u32)>,
    /// Extended attributes: name and value.
    pub attributes: Vec<(Vec<u8>, Vec<u8>)>,
    /// Map of a sparse file.
    pub sparse: sparse::PaxSparse,
}

/// Parses records and adds them to the extensions.
///
/// # Errors
/// A record is malformed, or there are too many attributes.
pub fn parse(mut bytes: &[u8], into: &mut Extensions) -> Result<(), TarError> {
    while !bytes.is_empty() {
        let (key, value, rest) = record(bytes).ok_or(TarError::Header("invalid PAX record"))?;
        bytes = rest;
        apply(into, key, value)?;
    }
    Ok(())
}

fn record(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    // No valid length has 20 digits or more.
    let space = bytes.iter().take(20).position(|byte| *byte == b' ')?;
    let length = usize::try_from(decimal(bytes.get(..space)?)?).ok()?;
    let (record, rest) = bytes.split_at_checked(length)?;
    let record = record.get(space + 1..)?.strip_suffix(b"\n")?;
    let equals = record.iter().position(|byte| *byte == b'=')?;
    let key = record.get(..equals)?;
    (!key.is_empty()).then_some((key, record.get(equals + 1..)?, rest))
}

fn apply(into: &mut Extensions, key: &[u8], value: &[u8]) -> Result<(), TarError> {
    let text = |value: &[u8]| (!value.is_empty()).then(|| value.to_vec());
    let number = |value: &[u8]| match value {
        [] => Ok(None),
        digits => decimal(digits).map(Some).ok_or(TarError::Header("invalid number in PAX record")),
    };
    match key {
        b"path" => into.path = text(value),
        b"linkpath" => into.link = text(value),
        b"size" => into.size = number(value)?,
        b"uid" => into.uid = number(value)?,
        b"gid" => into.gid = number(value)?,
        b"mtime" => into.mtime = time(value)?,
        b"atime" => into.atime = time(value)?,
        _ if key.starts_with(b"GNU.sparse.") => into.sparse.apply(key.get(11..).unwrap_or_default(), value)?,
        _ => {
            let Some(name) = key.strip_prefix(b"SCHILY.xattr.") else { return Ok(()) };
            into.attributes.retain(|(known, _)| known != name);
            if into.attributes.len() >= MOST_ATTRIBUTES {
                return Err(TarError::Header("too many extended attributes"));
            }
            into.attributes.push((name.to_vec(), value.to_vec()));
        }
    }
    Ok(())
}

/// Parses decimal digits; `None` for anything else.
pub fn decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u64, |value, digit| match digit {
        b'0'..=b'9' => value.checked_mul(10)?.checked_add(u64::from(digit - b'0')),
        _ => None,
    })
}

/// `[-]seconds[.fraction]`; digits beyond nanoseconds are ignored.
fn time(value: &[u8]) -> Result<Option<(i64, u32)>, TarError> {
    const WRONG: TarError = TarError::Header("invalid time in PAX record");
    if value.is_empty() {
        return Ok(None);
    }
    let (is_negative, value) = value.strip_prefix(b"-").map_or((false, value), |rest| (true, rest));
    let mut parts = value.splitn(2, |byte| *byte == b'.');
    let seconds = parts.next().and_then(decimal).and_then(|seconds| i64::try_from(seconds).ok()).ok_or(WRONG)?;
    let fraction = parts.next().unwrap_or_default();
    let mut nanoseconds = 0u32;
    for at in 0..9 {
        nanoseconds = nanoseconds * 10
            + match fraction.get(at) {
                None => 0,
                Some(digit @ b'0'..=b'9') => u32::from(digit - b'0'),
                Some(_) => return Err(WRONG),
            };
    }
    Ok(Some(match (is_negative, nanoseconds) {
        (false, _) => (seconds, nanoseconds),
        (true, 0) => (-seconds, 0),
        (true, _) => (-seconds - 1, 1_000_000_000 - nanoseconds),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Option<Extensions> {
        let mut out = Extensions::default();
        parse(text.as_bytes(), &mut out).ok().map(|()| out)
    }

    #[test]
    fn records_are_read() {
        let read =
            read("12 path=a/b\n12 path=c/d\n15 size=123456\n25 SCHILY.xattr.user.a=b\n11 other=1\n").expect("records");
        assert_eq!(read.path.as_deref(), Some(&b"c/d"[..]));
        assert_eq!(read.size, Some(123_456));
        assert_eq!(read.attributes, [(b"user.a".to_vec(), b"b".to_vec())]);
    }

    #[test]
    fn broken_records_are_refused() {
        for text in [
            "x",
            "5",
            "5 a=b",
            "6 a=b\nx",
            "99 path=a\n",
            "4 a=\n\n",
            "12 path=a/bX",
            "0 a=b\n",
            "99999999999999999999999 a=b\n",
            "4 =\n",
            "5 ab\n",
            "12 size=12x\n",
            "13 mtime=1.x\n",
        ] {
            assert_eq!(read(text), None, "{text:?}");
        }
        assert_eq!(read(""), Some(Extensions::default()));
    }

    #[test]
    fn times_before_the_epoch_are_times() {
        for (text, expected) in [
            ("0", (0, 0)),
            ("1.5", (1, 500_000_000)),
            ("-1", (-1, 0)),
            ("-1.25", (-2, 750_000_000)),
            ("12.1234567891", (12, 123_456_789)),
        ] {
            assert_eq!(time(text.as_bytes()).expect("a time"), Some(expected), "{text}");
        }
    }
}
