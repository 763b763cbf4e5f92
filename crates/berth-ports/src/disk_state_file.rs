//! A state file on this machine's disk: the real player of [`StateFile`].

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use tokio::{task::JoinHandle, time::timeout};

use super::StateFile;
use berth_sys::atomic_file;

/// State files hold nothing that others need to read.
const MODE: u32 = 0o600;

/// But for those that others do read.
const SHOWN: u32 = 0o644;

/// One file, replaced atomically.
#[derive(Clone, Debug)]
pub struct DiskStateFile {
    path: PathBuf,
    mode: u32,
}

impl DiskStateFile {
    /// The file at that path; its directory must exist when it is written.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), mode: MODE }
    }

    /// The same for a file that everybody may read.
    pub fn shown(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), mode: SHOWN }
    }
}

#[async_trait]
impl StateFile for DiskStateFile {
    fn path(&self) -> &Path {
        &self.path
    }

    async fn read(&self) -> io::Result<Option<Vec<u8>>> {
        let path = self.path.clone();
        tokio::task::spawn_blocking(move || atomic_file::read(&path)).await.map_err(io::Error::other)?
    }

    async fn replace(&self, content: Vec<u8>) -> io::Result<()> {
        let (path, mode) = (self.path.clone(), self.mode);
        tokio::task::spawn_blocking(move || atomic_file::replace(&path, &content, mode))
            .await
            .map_err(io::Error::other)?
    }
}

/// Writes a file on each request, one write at a time: a disk that hangs blocks one thread at most.
pub struct OneWrite {
    file: Arc<dyn StateFile>,
    limit: Duration,
    /// It has not ended in its time.
    hung: Option<JoinHandle<io::Result<()>>>,
}

impl OneWrite {
    /// Nothing is written yet; each write may take so long.
    pub fn new(file: Arc<dyn StateFile>, limit: Duration) -> Self {
        Self { file, limit, hung: None }
    }

    /// File that [`Self::replace`] writes; reads of it have no timeout.
    pub fn file(&self) -> &dyn StateFile {
        &*self.file
    }

    /// Writes, where no earlier write is under way.
    ///
    /// # Errors
    /// Error of the write; or it, or an earlier one, did not complete before the deadline.
    pub async fn replace(&mut self, content: Vec<u8>) -> io::Result<()> {
        if self.hung.as_ref().is_some_and(|hung| !hung.is_finished()) {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "a previous write is still in progress"));
        }
        let file = self.file.clone();
        let write = self.hung.insert(tokio::spawn(async move { file.replace(content).await }));
        let ended = timeout(self.limit, write).await;
        match ended {
            Ok(written) => {
                self.hung = None;
                written.map_err(io::Error::other)?
            }
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "write timed out")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::Semaphore;

    use super::*;

    /// Ends a write for each permit.
    struct Slow(AtomicUsize, Semaphore);

    #[async_trait]
    impl StateFile for Slow {
        fn path(&self) -> &Path {
            Path::new("/slow")
        }
        async fn read(&self) -> io::Result<Option<Vec<u8>>> {
            Ok(None)
        }
        async fn replace(&self, _content: Vec<u8>) -> io::Result<()> {
            self.0.fetch_add(1, Ordering::AcqRel);
            self.1.acquire().await.map_err(io::Error::other)?.forget();
            Ok(())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_disk_that_hangs_keeps_one_write() {
        let slow = Arc::new(Slow(AtomicUsize::new(0), Semaphore::new(0)));
        let mut writes = OneWrite::new(slow.clone(), Duration::from_secs(10));
        for _ in 0..5 {
            assert!(writes.replace(Vec::new()).await.is_err());
        }
        assert_eq!(slow.0.load(Ordering::Acquire), 1);
        slow.1.add_permits(2);
        while slow.1.available_permits() == 2 {
            tokio::task::yield_now().await;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
        writes.replace(Vec::new()).await.expect("it ends again");
        assert_eq!(slow.0.load(Ordering::Acquire), 2);
    }
}
