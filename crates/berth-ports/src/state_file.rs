//! One small file that outlives the agent: allocated and actuated resources (spec 02a §8.1).

use std::{io, path::Path};

use async_trait::async_trait;

/// A file that is read once and replaced as a whole. The real player is
/// `sys::atomic_file::AtomicFile`.
#[async_trait]
pub trait StateFile: Send + Sync + 'static {
    /// Where it lies, for texts.
    fn path(&self) -> &Path;
    /// The content; `None` where there is no file.
    async fn read(&self) -> io::Result<Option<Vec<u8>>>;
    /// Replaces the content so that a crash leaves either the old or the new one.
    async fn replace(&self, content: Vec<u8>) -> io::Result<()>;
}
