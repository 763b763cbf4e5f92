//! Why something about an image could not be done. Pure.
//!
//! The text is what people read in a pod's event, word for word; the kind is what a CRI status code is made of.
//! Behaviour: spec 09b §3, §4.3, §5.2; 09a §1 (codes).

use std::{fmt, io};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// Kinds of failures, as CRI tells them apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Kind {
    /// No such image, tag, layer.
    NotFound,
    /// The caller's words make no sense, or mean more than one thing.
    InvalidArgument,
    /// Disk full, or a layer beyond its limits.
    ResourceExhausted,
    /// Taken, e.g. a snapshot of that container.
    AlreadyExists,
    /// It took too long.
    DeadlineExceeded,
    /// Nobody waits for it any more.
    Cancelled,
    /// Content is not what its digest promises.
    DataLoss,
    /// No registry answers.
    Unavailable,
    /// Everything else.
    Unknown,
}

/// A failure.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
#[error("{text}")]
pub struct ImageError {
    /// What kind of failure.
    pub kind: Kind,
    /// For people.
    pub text: String,
}

impl ImageError {
    /// A failure of a kind.
    pub fn new(kind: Kind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into() }
    }

    /// Nothing of that name.
    pub fn not_found(text: impl Into<String>) -> Self {
        Self::new(Kind::NotFound, text)
    }

    /// What was asked makes no sense.
    pub fn invalid(text: impl Into<String>) -> Self {
        Self::new(Kind::InvalidArgument, text)
    }

    /// Content that breaks the rules of its format.
    pub fn bad_content(text: impl Into<String>) -> Self {
        Self::new(Kind::Unknown, text)
    }

    /// What the kernel said when something was attempted: a full disk is told as such.
    pub fn io(what: impl fmt::Display, error: &io::Error) -> Self {
        let full = [Errno::NOSPC, Errno::DQUOT].iter().any(|e| error.raw_os_error() == Some(e.raw_os_error()));
        Self::new(if full { Kind::ResourceExhausted } else { Kind::Unknown }, format!("{what}: {error}"))
    }

    /// The same failure with what was being done before its text.
    #[must_use]
    pub fn within(self, what: impl fmt::Display) -> Self {
        Self { kind: self.kind, text: format!("{what}: {}", self.text) }
    }
}

/// Says what was attempted when the kernel refuses.
pub(crate) trait Attempt<T> {
    /// Adds the attempt to the failure.
    fn attempt(self, what: impl fmt::Display) -> Result<T, ImageError>;
}

impl<T, E: Into<io::Error>> Attempt<T> for Result<T, E> {
    fn attempt(self, what: impl fmt::Display) -> Result<T, ImageError> {
        self.map_err(|error| ImageError::io(what, &error.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_told_as_such() {
        for (errno, kind) in [
            (Errno::NOSPC, Kind::ResourceExhausted),
            (Errno::DQUOT, Kind::ResourceExhausted),
            (Errno::IO, Kind::Unknown),
        ] {
            let error = ImageError::io("write blob", &errno.into());
            assert_eq!(error.kind, kind, "{errno}");
            assert!(error.text.starts_with("write blob: "), "{error}");
        }
    }
}
