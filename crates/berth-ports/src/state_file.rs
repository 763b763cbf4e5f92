//! Port of the checkpoint of allocated and actuated resources (spec 02a §8.1).

use std::{io, path::Path};

use async_trait::async_trait;

/// A file that is read once and replaced atomically. The production implementation is `sys::atomic_file::AtomicFile`.
#[async_trait]
pub trait StateFile: Send + Sync + 'static {
    /// Path of the file, for messages.
    fn path(&self) -> &Path;
    /// Content; `None` if the file does not exist.
    async fn read(&self) -> io::Result<Option<Vec<u8>>>;
    /// Replaces the content so that a crash leaves either the old or the new content.
    async fn replace(&self, content: Vec<u8>) -> io::Result<()>;
}
