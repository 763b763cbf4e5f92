//! Checkpoint file of allocated pod resources. Implements spec 02a §8.1.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use berth_ports::StateFile;
use berth_types::resource_state::{CorruptState, ResourceEntries, decode, encode};

/// Deadline of one disk operation: a hung disk must not block the agent forever.
const DEADLINE: Duration = Duration::from_secs(10);

/// The checkpoint cannot be restored; the agent does not start.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The file cannot be read.
    #[error("could not read the state file {path:?}: {cause}")]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// The I/O error.
        cause: io::Error,
    },
    /// The content is corrupt.
    #[error(
        "could not restore state from checkpoint: {cause}, please drain this node and delete pod allocation checkpoint file {path:?} before restarting Kubelet"
    )]
    Corrupt {
        /// Path of the file.
        path: PathBuf,
        /// The decoding error.
        cause: CorruptState,
    },
}

/// A checkpoint file and its last written content.
pub struct Checkpoint {
    file: Arc<dyn StateFile>,
    written: Option<Vec<u8>>,
}

impl Checkpoint {
    /// Reads the file; a missing one yields no entries.
    ///
    /// # Errors
    /// The file cannot be read, or is corrupt.
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

    /// Path of the file, for error texts.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Writes the entries unless the file already contains them.
    ///
    /// # Errors
    /// The file cannot be written; the next call retries.
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

#[cfg(test)]
mod tests {
    use super::*;
    use berth_ports::DiskStateFile;

    #[tokio::test]
    async fn a_checkpoint_lives_on_disk_and_names_itself_when_damaged() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("allocated_pods_state");
        let file = || Arc::new(DiskStateFile::new(&path));
        let (mut checkpoint, entries) = Checkpoint::load(file()).await.expect("missing means empty");
        let entries = entries.into_iter().chain([("u".into(), Default::default())]).collect();
        checkpoint.store(&entries).await.expect("writable");
        assert_eq!(Checkpoint::load(file()).await.expect("sound").1, entries);
        // AC-02a-21
        std::fs::write(&path, "{").expect("writable");
        let error = Checkpoint::load(file()).await.map(|_| ()).expect_err("damaged").to_string();
        assert!(error.contains(&format!("{path:?}")) && error.contains("please drain this node"), "{error}");
    }
}
