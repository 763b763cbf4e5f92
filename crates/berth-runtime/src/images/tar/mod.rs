//! Tar reader for untrusted archives, and a minimal writer. Formats: V7, ustar, PAX, GNU.
//!
//! Headers ([`header`]), PAX extensions ([`pax`]), and maps of sparse files ([`sparse`]) are pure; [`reader`] walks a
//! stream. All lengths are bounded before anything is allocated, and nothing here accesses a file system.
//! Implements spec 09b §5.2.

pub mod header;
pub mod pax;
pub mod reader;
pub mod sparse;
pub mod writer;

/// Why an archive cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TarError {
    /// Reading the stream failed.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The archive ends within a header or a file.
    #[error("unexpected end of archive")]
    Truncated,
    /// The header is invalid.
    #[error("invalid tar header: {0}")]
    Header(&'static str),
    /// An extension exceeds the length limit.
    #[error("tar extension of {0} bytes")]
    TooLong(u64),
    /// The entry type is unknown.
    #[error("unknown tar entry type {0:?}")]
    UnknownType(char),
}
