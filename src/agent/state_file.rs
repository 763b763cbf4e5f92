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
