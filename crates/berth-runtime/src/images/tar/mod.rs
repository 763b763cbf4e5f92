//! Reading tar archives whose authors we do not trust.
//!
//! Headers ([`header`]), their extensions ([`pax`]) and maps of sparse files ([`sparse`]) are pure; [`reader`] walks a
//! stream. All lengths are bounded before anything is allocated, and nothing here touches a file system. Formats: V7, ustar,
//! PAX, GNU. Behaviour: spec 09b §5.2.

pub mod header;
pub mod pax;
pub mod reader;
pub mod sparse;
pub mod write;

/// Why an archive cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TarError {
    /// The stream itself failed.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// It ends within a header or a file.
    #[error("unexpected end of archive")]
    Truncated,
    /// The bytes are no tar archive.
    #[error("invalid tar header: {0}")]
    Header(&'static str),
    /// An extension is longer than any honest one.
    #[error("tar extension of {0} bytes")]
    TooLong(u64),
    /// An entry of a kind nobody knows.
    #[error("unknown tar entry type {0:?}")]
    UnknownType(char),
}
