//! SHA-256 digests of content, and a reader that hashes what passes through it.
//!
//! Only `sha256:` with 64 lowercase hex digits, as registries use it. Implements spec 09b §1, §2.

use std::{fmt, io::Read, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use sha2::{Digest as _, Sha256};

use super::error::ImageError;

const PREFIX: &str = "sha256:";

/// SHA-256 digest of content.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// Computes the digest of the bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// The 64 hex digits, lowercase.
    pub fn hex(&self) -> String {
        hex::encode(self.0)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = ImageError;

    fn from_str(text: &str) -> Result<Self, ImageError> {
        let digits = text.strip_prefix(PREFIX).unwrap_or(text);
        let mut value = [0u8; 32];
        let is_lowercase = !digits.bytes().any(|digit| digit.is_ascii_uppercase());
        match hex::decode_to_slice(digits, &mut value) {
            Ok(()) if is_lowercase => Ok(Self(value)),
            _ => Err(ImageError::invalid(format!("invalid digest {text:?}: expected sha256 and 64 hex digits"))),
        }
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|_| de::Error::custom(format!("invalid digest {text:?}")))
    }
}

/// Incremental hasher that also counts the length.
#[derive(Clone, Default)]
pub struct Hasher {
    state: Sha256,
    length: u64,
}

impl Hasher {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.state.update(bytes);
        self.length = self.length.saturating_add(bytes.len() as u64);
    }

    /// Bytes added so far.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// The digest of all bytes added.
    pub fn finish(self) -> Digest {
        Digest(self.state.finalize().into())
    }
}

/// A reader that hashes the bytes read.
pub struct HashingReader<R> {
    inner: R,
    hasher: Hasher,
}

impl<R: Read> HashingReader<R> {
    /// Wraps a reader.
    pub fn new(inner: R) -> Self {
        Self { inner, hasher: Hasher::default() }
    }

    /// The wrapped reader.
    pub fn inner(&self) -> &R {
        &self.inner
    }

    /// Bytes read so far.
    pub fn length(&self) -> u64 {
        self.hasher.length()
    }

    /// The digest of the bytes read.
    pub fn finish(self) -> Digest {
        self.hasher.finish()
    }
}

impl<R: Read> Read for HashingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.hasher.update(buffer.get(..count).unwrap_or_default());
        Ok(count)
    }
}

/// Chain IDs of the layers, bottom first (spec 09b §5.1).
pub fn chain_ids(diff_ids: &[Digest]) -> Vec<Digest> {
    let mut chain: Vec<Digest> = Vec::with_capacity(diff_ids.len());
    for diff in diff_ids {
        let next = match chain.last() {
            None => *diff,
            Some(below) => Digest::of(format!("{below} {diff}").as_bytes()),
        };
        chain.push(next);
    }
    chain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_read_and_written() {
        let empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::of(b"").to_string(), empty);
        assert_eq!(empty.parse::<Digest>().expect("a digest"), Digest::of(b""));
        assert_eq!(empty[7..].parse::<Digest>().expect("a digest"), Digest::of(b""));
        for wrong in ["", "sha256:", "sha256:00", &empty.to_uppercase(), "sha512:00", &format!("{empty}0"), "../../x"] {
            assert!(wrong.parse::<Digest>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn chains_are_those_of_the_specification() {
        let (a, b) = (Digest::of(b"a"), Digest::of(b"b"));
        assert_eq!(chain_ids(&[]), []);
        assert_eq!(chain_ids(&[a]), [a]);
        assert_eq!(chain_ids(&[a, b]), [a, Digest::of(format!("{a} {b}").as_bytes())]);
    }

    #[test]
    fn a_stream_is_hashed_as_it_is_read() {
        let mut reader = HashingReader::new(&b"hello"[..]);
        std::io::copy(&mut reader, &mut std::io::sink()).expect("readable");
        assert_eq!(reader.length(), 5);
        assert_eq!(reader.finish(), Digest::of(b"hello"));
    }
}
