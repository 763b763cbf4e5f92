//! Certificates the agent makes itself: the serving pair where none is configured, and for a node
//! without a cluster an authority of its own with an administrator's certificate (spec 01 §11.6,
//! spec 04 §7).
//!
//! What is made lies in the certificate directory, keys with mode 0600, each file replaced as a
//! whole; whoever serves with it follows the files. Keys are EC P-256: the reference makes RSA
//! keys, which cost thirty times as much in every handshake.

mod admin;
mod look;
mod make;
mod serving;

use std::{
    io,
    path::{Path, PathBuf},
};

pub use admin::{Admin, keep_admin};
pub use look::{Seen, covers, fits};
pub use make::{Authority, Issued, MakeError, Validity};
pub use serving::Serving;

use berth_sys::atomic_file;

/// A certificate cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// One of two files is missing.
    #[error("error reading {0}, certificate and key must be supplied as a pair")]
    HalfAPair(String),
    /// What is there cannot be read, so that nobody knows whether it is good.
    #[error("cannot read {path}: {cause}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        cause: io::Error,
    },
    /// It cannot be made.
    #[error(transparent)]
    Make(#[from] MakeError),
    /// It cannot be written.
    #[error("cannot write {path}: {cause}")]
    Write {
        /// The file.
        path: String,
        /// Why.
        cause: io::Error,
    },
}

/// Readable by all.
const PUBLIC: u32 = 0o644;
/// Readable by us.
const PRIVATE: u32 = 0o600;

/// A certificate and its key on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PairFiles {
    /// The certificate, PEM.
    pub certificate: PathBuf,
    /// The key, PEM.
    pub key: PathBuf,
}

impl PairFiles {
    /// `name.crt` and `name.key` in a directory.
    pub fn of(directory: &Path, name: &str) -> Self {
        Self { certificate: directory.join(format!("{name}.crt")), key: directory.join(format!("{name}.key")) }
    }

    /// What they hold; `None` for what is not there or cannot be read.
    pub fn read(&self) -> (Option<String>, Option<String>) {
        let read = |path: &Path| std::fs::read_to_string(path).ok();
        (read(&self.certificate), read(&self.key))
    }

    /// What they hold; `None` for what is not there.
    ///
    /// # Errors
    /// Something is there and cannot be read.
    pub fn read_or_tell(&self) -> Result<(Option<String>, Option<String>), CertificateError> {
        let read = |path: &Path| match std::fs::read(path) {
            Ok(content) => Ok(Some(String::from_utf8_lossy(&content).into_owned())),
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(cause) => Err(CertificateError::Read { path: path.display().to_string(), cause }),
        };
        Ok((read(&self.certificate)?, read(&self.key)?))
    }

    /// Writes both, the key first: a certificate without a key must never be found.
    ///
    /// # Errors
    /// Whatever writing says.
    pub fn write(&self, issued: &Issued) -> Result<(), CertificateError> {
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
