//! Certificates the agent issues: serving pair, and CA and administrator of a standalone node.
//!
//! The serving pair is created if none is configured; the CA and the administrator's certificate if the node has no
//! cluster. All are in the certificate directory; keys have mode 0600, each file is replaced atomically, and servers
//! reload the files. Keys are EC P-256: kubelet creates RSA keys, which cost thirty times as much in every handshake.
//! Implements spec 04 §7 and spec 01 §11.6 for them.

mod admin;
mod certificate_info;
mod issuer;
mod serving_certificate;

use std::{
    io,
    path::{Path, PathBuf},
};

pub use admin::{Admin, ensure_admin};
pub use certificate_info::{CertificateInfo, covers, key_matches};
pub use issuer::{Authority, CertificatePair, MakeError, Validity};
pub use serving_certificate::ServingCertificate;

use berth_sys::atomic_file;

/// A certificate pair cannot be loaded, created, or written.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// Only one file of the pair exists; the path is that of the missing file.
    #[error("error reading {0}, certificate and key must be supplied as a pair")]
    HalfAPair(String),
    /// An existing file cannot be read, so its validity is unknown.
    #[error("cannot read {path}: {cause}")]
    Read {
        /// Path of the file.
        path: String,
        /// I/O error.
        cause: io::Error,
    },
    /// The pair cannot be created.
    #[error(transparent)]
    Make(#[from] MakeError),
    /// The pair cannot be written.
    #[error("cannot write {path}: {cause}")]
    Write {
        /// Path of the file.
        path: String,
        /// I/O error.
        cause: io::Error,
    },
}

/// File mode of certificates.
const PUBLIC: u32 = 0o644;
/// File mode of keys.
const PRIVATE: u32 = 0o600;

/// Paths of a certificate and its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificatePairPaths {
    /// Certificate file, PEM.
    pub certificate: PathBuf,
    /// Key file, PEM.
    pub key: PathBuf,
}

impl CertificatePairPaths {
    /// Paths of `name.crt` and `name.key` in a directory.
    pub fn of(directory: &Path, name: &str) -> Self {
        Self { certificate: directory.join(format!("{name}.crt")), key: directory.join(format!("{name}.key")) }
    }

    /// Reads certificate and key; `None` for a file that is missing or unreadable.
    pub fn read(&self) -> (Option<String>, Option<String>) {
        let read = |path: &Path| std::fs::read_to_string(path).ok();
        (read(&self.certificate), read(&self.key))
    }

    /// Reads certificate and key; `None` for a missing file.
    ///
    /// # Errors
    /// A file exists and cannot be read.
    pub fn read_existing(&self) -> Result<(Option<String>, Option<String>), CertificateError> {
        let read = |path: &Path| match std::fs::read(path) {
            Ok(content) => Ok(Some(String::from_utf8_lossy(&content).into_owned())),
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(cause) => Err(CertificateError::Read { path: path.display().to_string(), cause }),
        };
        Ok((read(&self.certificate)?, read(&self.key)?))
    }

    /// Writes both files, the key first: a certificate must never exist without its key.
    ///
    /// # Errors
    /// A directory or file cannot be written.
    pub fn write(&self, issued: &CertificatePair) -> Result<(), CertificateError> {
        let write = |path: &Path, text: &str, mode: u32| {
            let directory = path.parent().unwrap_or(Path::new("."));
            make_directory(directory)
                .and_then(|()| atomic_file::replace(path, text.as_bytes(), mode))
                .map_err(|cause| CertificateError::Write { path: path.display().to_string(), cause })
        };
        write(&self.key, &issued.key, PRIVATE)?;
        write(&self.certificate, &issued.certificate, PUBLIC)
    }
}

fn make_directory(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o755).create(path)
}
