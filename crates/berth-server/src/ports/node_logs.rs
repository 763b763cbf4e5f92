//! What `/logs/` asks about the machine's logs: files below one directory, and the journal.

use std::{fs::File, io, time::SystemTime};

use async_trait::async_trait;
use tokio::io::AsyncRead;

/// A file to read.
#[derive(Debug)]
pub struct NodeFile {
    /// Open for reading, at its beginning.
    pub file: File,
    /// Its length when it was opened.
    pub bytes: u64,
    /// When it was last written.
    pub modified: Option<SystemTime>,
    /// Its first bytes, at most 512: what its kind is told by.
    pub head: Vec<u8>,
}

/// A directory to show.
#[derive(Debug)]
pub struct NodeDirectory {
    /// Names and whether each is a directory, sorted.
    pub entries: Vec<(String, bool)>,
    /// When it was last changed.
    pub modified: Option<SystemTime>,
}

/// What a path names.
#[derive(Debug)]
pub enum NodeEntry {
    /// A regular file.
    File(NodeFile),
    /// A directory.
    Directory(NodeDirectory),
}

/// Why a path cannot be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NodeLogError {
    /// There is nothing to read: missing, or no file, or behind a link.
    #[error("{0}")]
    Missing(String),
    /// We may not read it.
    #[error("{0}")]
    Forbidden(String),
    /// Something else.
    #[error("{0}")]
    Other(String),
}

/// The logs of this machine.
#[async_trait]
pub trait NodeLogs: Send + Sync + 'static {
    /// Opens what a relative path without `..` names; an empty one names the directory of all logs.
    ///
    /// # Errors
    /// Why it cannot be read.
    async fn open(&self, path: &str) -> Result<NodeEntry, NodeLogError>;

    /// The units the journal knows, one a line; `None` where there is no journal.
    async fn units(&self) -> Option<String>;

    /// What `journalctl` with these arguments writes, to either stream; it ends when the reader is dropped.
    ///
    /// # Errors
    /// It cannot be started.
    fn journal(&self, arguments: &[String]) -> io::Result<Box<dyn AsyncRead + Send + Unpin>>;
}
