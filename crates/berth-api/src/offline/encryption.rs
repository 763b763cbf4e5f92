//! Encryption at rest with AES-256-GCM and a key file.
//!
//! A random nonce per version of the file; the header and the node's name are authenticated.
//!
//! Format: `BERTHOFF` · version (1 byte) · nonce (12 bytes) · ciphertext · tag (16 bytes).

use std::{fs::File, io::Read, os::unix::fs::MetadataExt, path::Path};

use ring::{
    aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey},
    rand::{SecureRandom, SystemRandom},
};

/// Magic bytes of the file; the last byte is the format version.
const HEADER: &[u8; 9] = b"BERTHOFF\x01";
/// Key size in bytes.
const KEY: usize = 32;
/// Bytes read of the key file at most.
const KEY_FILE: u64 = 4096;

/// Why a file cannot be encrypted or decrypted.
#[derive(Debug, thiserror::Error)]
pub enum SealError {
    /// The key file cannot be read.
    #[error("cannot read the key file {path}: {cause}")]
    ReadKey {
        /// Path of the key file.
        path: String,
        /// I/O error of opening or reading the key file.
        cause: std::io::Error,
    },
    /// The key file does not contain a key.
    #[error("the key file {0} must contain 32 bytes or 64 hexadecimal digits")]
    NoKey(String),
    /// The key file is accessible by group or others.
    #[error("the key file {path} has mode {mode:04o}, must be accessible by its owner only")]
    OpenKey {
        /// Path of the key file.
        path: String,
        /// Permission bits of the key file.
        mode: u32,
    },
    /// The file has another format or format version.
    #[error("not an encrypted checkpoint of a supported version")]
    NotOurs,
    /// Authentication failed: another key or node, or the file was modified.
    #[error("decryption failed: written with another key or for another node, or modified")]
    Changed,
    /// The system provides no randomness.
    #[error("no random bytes available for the nonce")]
    NoRandomness,
    /// A blocking task panicked or was cancelled.
    #[error("{0}")]
    Task(String),
}

/// Encrypts and decrypts with one key, for one node.
pub struct Sealer {
    key: LessSafeKey,
    bound: Vec<u8>,
}

impl Sealer {
    /// Reads the key from a file. Blocking.
    ///
    /// # Errors
    /// The key file is unreadable, accessible by others, or does not contain a key.
    pub fn open(key_file: &Path, node: &str) -> Result<Self, SealError> {
        let path = || key_file.display().to_string();
        let failed = |cause| SealError::ReadKey { path: path(), cause };
        let file = File::open(key_file).map_err(failed)?;
        let mode = file.metadata().map_err(failed)?.mode() & 0o7777;
        if mode & 0o077 != 0 {
            return Err(SealError::OpenKey { path: path(), mode });
        }
        let mut content = Vec::new();
        file.take(KEY_FILE).read_to_end(&mut content).map_err(failed)?;
        let key = key(&content).and_then(|key| UnboundKey::new(&AES_256_GCM, &key).ok());
        let key = key.ok_or_else(|| SealError::NoKey(path()))?;
        Ok(Self { key: LessSafeKey::new(key), bound: [HEADER, node.as_bytes()].concat() })
    }

    /// Encrypts a plaintext and prepends header and nonce.
    ///
    /// # Errors
    /// The system provides no randomness.
    pub fn seal(&self, plain: &[u8]) -> Result<Vec<u8>, SealError> {
        let mut nonce = [0; NONCE_LEN];
        SystemRandom::new().fill(&mut nonce).map_err(|_| SealError::NoRandomness)?;
        let mut sealed = plain.to_vec();
        let used = Nonce::assume_unique_for_key(nonce);
        self.key
            .seal_in_place_append_tag(used, Aad::from(&self.bound), &mut sealed)
            .map_err(|_| SealError::NoRandomness)?;
        Ok([HEADER.as_slice(), &nonce, &sealed].concat())
    }

    /// Decrypts the content of a file.
    ///
    /// # Errors
    /// It was not encrypted with this key for this node.
    pub fn unseal(&self, sealed: Vec<u8>) -> Result<Vec<u8>, SealError> {
        let rest = sealed.strip_prefix(HEADER.as_slice()).ok_or(SealError::NotOurs)?;
        let (nonce, rest) = rest.split_first_chunk::<NONCE_LEN>().ok_or(SealError::NotOurs)?;
        let mut content = rest.to_vec();
        let nonce = Nonce::assume_unique_for_key(*nonce);
        let plain =
            self.key.open_in_place(nonce, Aad::from(&self.bound), &mut content).map_err(|_| SealError::Changed)?.len();
        content.truncate(plain);
        Ok(content)
    }
}

/// Parses 32 raw bytes, or 64 hexadecimal digits with surrounding white space.
fn key(content: &[u8]) -> Option<[u8; KEY]> {
    if let Ok(key) = <[u8; KEY]>::try_from(content) {
        return Some(key);
    }
    let text = std::str::from_utf8(content).ok()?.trim();
    let digits: Option<Vec<u8>> = text.chars().map(|c| c.to_digit(16).and_then(|d| u8::try_from(d).ok())).collect();
    let bytes: Vec<u8> = digits?.chunks(2).map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | digit)).collect();
    (text.len() == 2 * KEY).then(|| <[u8; KEY]>::try_from(bytes).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    fn file(folder: &Path, content: &[u8], mode: u32) -> std::path::PathBuf {
        let path = folder.join("key");
        // A file whose mode forbids writing cannot be rewritten.
        let _ = fs::remove_file(&path);
        fs::write(&path, content).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("changed");
        path
    }

    #[test]
    fn only_the_same_key_and_node_read_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let open =
            |content: &[u8], node: &str| Sealer::open(&file(folder.path(), content, 0o600), node).expect("a key");
        let sealer = open(&[7; 32], "n");
        let sealed = sealer.seal(b"secret text").expect("sealed");
        assert!(!sealed.windows(6).any(|part| part == b"secret"));
        assert_ne!(sealed, sealer.seal(b"secret text").expect("sealed"), "another nonce");
        assert_eq!(sealer.unseal(sealed.clone()).expect("opened"), b"secret text");
        assert_eq!(open(b"07".repeat(32).as_slice(), "n").unseal(sealed.clone()).expect("opened"), b"secret text");
        for other in [open(&[8; 32], "n"), open(&[7; 32], "m")] {
            assert!(matches!(other.unseal(sealed.clone()), Err(SealError::Changed)));
        }
        for at in [HEADER.len(), HEADER.len() + NONCE_LEN, sealed.len() - 1] {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            assert!(matches!(sealer.unseal(changed), Err(SealError::Changed)), "byte {at}");
        }
        for broken in [&[][..], b"BERTHOFF\x02abcdefghijklmnop", &sealed[..HEADER.len() + 5]] {
            assert!(matches!(sealer.unseal(broken.to_vec()), Err(SealError::NotOurs)));
        }
        assert!(matches!(sealer.unseal(sealed[..30].to_vec()), Err(SealError::Changed)), "cut off");
    }

    #[test]
    fn a_key_is_its_owners_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let open_error = |content: &[u8], mode| {
            Sealer::open(&file(folder.path(), content, mode), "n").map(drop).expect_err("no key").to_string()
        };
        assert!(open_error(&[7; 32], 0o640).ends_with("has mode 0640, must be accessible by its owner only"));
        for content in [&[][..], &[7; 31], &[7; 33], b"zz".repeat(32).as_slice(), b"07".repeat(31).as_slice()] {
            assert!(open_error(content, 0o400).ends_with("must contain 32 bytes or 64 hexadecimal digits"));
        }
        assert!(Sealer::open(&file(folder.path(), format!("{}\n", "aF".repeat(32)).as_bytes(), 0o400), "n").is_ok());
        let missing = Sealer::open(&folder.path().join("none"), "n").map(drop).expect_err("none").to_string();
        assert!(missing.starts_with("cannot read the key file "), "{missing}");
    }
}
