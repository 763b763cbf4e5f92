//! Port of the `/logs/` endpoint: files below the node's log directory, and the systemd journal.

use std::{fs::File, io, time::SystemTime};

use async_trait::async_trait;
use tokio::io::AsyncRead;

/// Regular file opened for reading.
#[derive(Debug)]
pub struct NodeFile {
    /// File, open for reading at its beginning.
    pub file: File,
    /// Length in bytes when it was opened.
    pub bytes: u64,
    /// Modification time.
    pub modified: Option<SystemTime>,
    /// First bytes, at most 512, for content type detection.
    pub head: Vec<u8>,
}

/// Directory listing.
#[derive(Debug)]
pub struct NodeDirectory {
    /// Entry names, sorted, and whether each is a directory.
    pub entries: Vec<(String, bool)>,
    /// Modification time.
    pub modified: Option<SystemTime>,
}

/// File system object that a path names.
#[derive(Debug)]
pub enum NodeEntry {
    /// A regular file.
    File(NodeFile),
    /// A directory whose entries have been listed.
    Directory(NodeDirectory),
}

/// Reason why a path cannot be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NodeLogError {
    /// Nothing to read: the path is missing, not a regular file, or behind a symbolic link.
    #[error("{0}")]
    Missing(String),
    /// Permission denied.
    #[error("{0}")]
    Forbidden(String),
    /// Any other reason.
    #[error("{0}")]
    Other(String),
}

/// Access to the node's logs.
#[async_trait]
pub trait NodeLogs: Send + Sync + 'static {
    /// Opens a relative path without `..`; the empty path names the log directory itself.
    ///
    /// # Errors
    /// Why the path cannot be read.
    async fn open(&self, path: &str) -> Result<NodeEntry, NodeLogError>;

    /// Units known to the journal, one per line; `None` where there is no journal.
    async fn units(&self) -> Option<String>;

    /// Runs `journalctl` with these arguments and returns its output, both streams; dropping the reader ends it.
    ///
    /// # Errors
    /// If the process cannot be started.
    fn journal(&self, arguments: &[String]) -> io::Result<Box<dyn AsyncRead + Send + Unpin>>;
}
