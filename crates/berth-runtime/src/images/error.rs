//! Errors of the image store. Pure.
//!
//! The text is shown verbatim in a pod's events; the kind determines the CRI status code. Implements spec 09b §3, §4.3,
//! §5.2; 09a §1 (codes).

use std::{fmt, io};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// Kind of an error, as CRI distinguishes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ImageErrorKind {
    /// No such image, tag, or layer.
    NotFound,
    /// The request is malformed or ambiguous.
    InvalidArgument,
    /// The disk is full, or a layer exceeds its limits.
    ResourceExhausted,
    /// The object exists, such as a snapshot of that container.
    AlreadyExists,
    /// The operation timed out.
    DeadlineExceeded,
    /// The operation was cancelled because no caller waits for it.
    Cancelled,
    /// Content does not match its digest.
    DataLoss,
    /// No registry is reachable.
    Unavailable,
    /// Any other failure.
    Unknown,
}

/// An error of the image store.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
#[error("{text}")]
pub struct ImageError {
    /// Kind of the error.
    pub kind: ImageErrorKind,
    /// Message for people.
    pub text: String,
}

impl ImageError {
    /// An error of that kind.
    pub fn new(kind: ImageErrorKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into() }
    }

    /// The object does not exist.
    pub fn not_found(text: impl Into<String>) -> Self {
        Self::new(ImageErrorKind::NotFound, text)
    }

    /// The request is invalid.
    pub fn invalid(text: impl Into<String>) -> Self {
        Self::new(ImageErrorKind::InvalidArgument, text)
    }

    /// Content violates its format.
    pub fn bad_content(text: impl Into<String>) -> Self {
        Self::new(ImageErrorKind::Unknown, text)
    }

    /// An I/O error during an operation; a full disk or quota is [`ImageErrorKind::ResourceExhausted`].
    pub fn io(what: impl fmt::Display, error: &io::Error) -> Self {
        let full = [Errno::NOSPC, Errno::DQUOT].iter().any(|e| error.raw_os_error() == Some(e.raw_os_error()));
        Self::new(
            if full { ImageErrorKind::ResourceExhausted } else { ImageErrorKind::Unknown },
            format!("{what}: {error}"),
        )
    }

    /// Prefixes the text with the operation that failed.
    #[must_use]
    pub fn within(self, what: impl fmt::Display) -> Self {
        Self { kind: self.kind, text: format!("{what}: {}", self.text) }
    }
}

/// Converts I/O errors with a description of the operation.
pub(crate) trait IoContext<T> {
    /// Prefixes the error with the operation.
    fn attempt(self, what: impl fmt::Display) -> Result<T, ImageError>;
}

impl<T, E: Into<io::Error>> IoContext<T> for Result<T, E> {
    fn attempt(self, what: impl fmt::Display) -> Result<T, ImageError> {
        self.map_err(|error| ImageError::io(what, &error.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_resource_exhausted() {
        for (errno, kind) in [
            (Errno::NOSPC, ImageErrorKind::ResourceExhausted),
            (Errno::DQUOT, ImageErrorKind::ResourceExhausted),
            (Errno::IO, ImageErrorKind::Unknown),
        ] {
            let error = ImageError::io("write blob", &errno.into());
            assert_eq!(error.kind, kind, "{errno}");
            assert!(error.text.starts_with("write blob: "), "{error}");
        }
    }
}
