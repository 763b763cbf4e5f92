//! Keeps allocations in a file. Behaviour: spec 02a §8.1.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use berth_ports::StateFile;
use berth_types::resource_state::{CorruptState, ResourceEntries, decode, encode};

/// Longest wait for the disk: a hung one must not hold up the agent for ever.
const DEADLINE: Duration = Duration::from_secs(10);

/// The file cannot be used; the agent does not start.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// It cannot be read.
    #[error("could not read the state file {path:?}: {cause}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// Its content is damaged.
    #[error(
        "could not restore state from checkpoint: {cause}, please drain this node and delete pod allocation checkpoint file {path:?} before restarting Kubelet"
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Why.
        cause: CorruptState,
    },
}

/// A state file and what it is known to hold.
pub struct Checkpoint {
    file: Arc<dyn StateFile>,
    written: Option<Vec<u8>>,
}

impl Checkpoint {
    /// Reads the file; a missing one holds nothing.
    ///
    /// # Errors
    /// The file cannot be read, or is damaged.
    pub async fn load(file: Arc<dyn StateFile>) -> Result<(Self, ResourceEntries), StateError> {
        let path = file.path().to_owned();
        let content = match bounded(file.read()).await {
            Ok(content) => content,
            Err(cause) => return Err(StateError::Io { path, cause }),
        };
        let entries = match content.as_deref().map(decode) {
            None => ResourceEntries::new(),
            Some(Ok(entries)) => entries,
            Some(Err(cause)) => return Err(StateError::Corrupt { path, cause }),
        };
        Ok((Self { file, written: content }, entries))
    }

    /// Where the file lies, for texts.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Writes the entries, unless the file holds just that.
    ///
    /// # Errors
    /// The file cannot be written; the next call tries again.
    pub async fn store(&mut self, entries: &ResourceEntries) -> io::Result<()> {
        let content = encode(entries);
        if self.written.as_ref() == Some(&content) {
            return Ok(());
        }
        self.written = None;
        bounded(self.file.replace(content.clone())).await?;
        self.written = Some(content);
        Ok(())
    }
}

async fn bounded<T>(work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(DEADLINE, work).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}
