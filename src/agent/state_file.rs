//! A state file on this machine's disk: the real player of [`StateFile`].

use std::{
    io,
    path::{Path, PathBuf},
};

use async_trait::async_trait;

use crate::{engine::ports::StateFile, sys::atomic_file};

/// State files hold nothing that others need to read.
const MODE: u32 = 0o600;

/// One file, replaced atomically.
#[derive(Clone, Debug)]
pub struct DiskStateFile(PathBuf);

impl DiskStateFile {
    /// The file at that path; its directory must exist when it is written.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }
}

#[async_trait]
impl StateFile for DiskStateFile {
    fn path(&self) -> &Path {
        &self.0
    }

    async fn read(&self) -> io::Result<Option<Vec<u8>>> {
        let path = self.0.clone();
        tokio::task::spawn_blocking(move || atomic_file::read(&path)).await.map_err(io::Error::other)?
    }

    async fn replace(&self, content: Vec<u8>) -> io::Result<()> {
        let path = self.0.clone();
        tokio::task::spawn_blocking(move || atomic_file::replace(&path, &content, MODE))
            .await
            .map_err(io::Error::other)?
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::engine::allocation::Checkpoint;

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
