//! Writer task of a checkpoint: one write at a time, and callers that wait for theirs.

use std::{io, sync::Arc, time::Duration};

use tokio::{sync::watch, time::sleep};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::error;

use berth_ports::{OneWrite, StateFile};

/// Deadline of one write.
const WRITE: Duration = Duration::from_secs(10);
/// Delay after which a failed write is repeated.
const RETRY: Duration = Duration::from_secs(30);

/// Result of the last write.
#[derive(Clone, Default)]
struct CheckpointWrite {
    /// Number of the newest request that the write satisfies.
    number: u64,
    error: Option<Arc<io::Error>>,
    /// Number of the newest request that is on disk.
    saved: u64,
}

/// Requests writes of a checkpoint.
#[derive(Clone)]
pub struct CheckpointWriter {
    requested: watch::Sender<u64>,
    written: watch::Receiver<CheckpointWrite>,
}

impl CheckpointWriter {
    /// Spawns the task that writes what `encode` returns, until `shutdown`; a request before that is still served.
    pub fn spawn(
        tasks: &TaskTracker,
        shutdown: &CancellationToken,
        file: Arc<dyn StateFile>,
        encode: impl Fn() -> Vec<u8> + Send + 'static,
    ) -> Self {
        let (requested, requests) = watch::channel(0);
        let (done, written) = watch::channel(CheckpointWrite::default());
        tasks.spawn(run(requests, done, file, encode, shutdown.clone()));
        Self { requested, written }
    }

    /// Requests a write of the current content.
    pub fn request(&self) -> u64 {
        self.requested.send_modify(|count| *count = count.saturating_add(1));
        *self.requested.borrow()
    }

    /// Waits until the content of a request is on disk; a write that failed is repeated at once.
    ///
    /// # Errors
    /// The text of the write's error.
    pub async fn saved(&self, request: u64) -> Result<(), String> {
        let CheckpointWrite { saved, error, .. } = self.written.borrow().clone();
        match error {
            _ if saved >= request => Ok(()),
            Some(_) => self.write().await,
            None => self.wait_for(request).await,
        }
    }

    /// Writes the current content and waits until it is on disk.
    ///
    /// # Errors
    /// The text of the write's error.
    pub async fn write(&self) -> Result<(), String> {
        let number = self.request();
        self.wait_for(number).await
    }

    async fn wait_for(&self, number: u64) -> Result<(), String> {
        let mut written = self.written.clone();
        let done = written.wait_for(|written| written.number >= number).await;
        match done.map(|written| written.error.clone()) {
            Ok(None) => Ok(()),
            Ok(Some(error)) => Err(format!("failed to write checkpoint file: {error}")),
            Err(_) => Err("failed to write checkpoint file: the agent is stopping".to_owned()),
        }
    }
}

async fn run(
    mut requests: watch::Receiver<u64>,
    done: watch::Sender<CheckpointWrite>,
    file: Arc<dyn StateFile>,
    encode: impl Fn() -> Vec<u8>,
    shutdown: CancellationToken,
) {
    let mut writes = OneWrite::new(file, WRITE);
    loop {
        let has_failed = done.borrow().error.is_some();
        let is_last = tokio::select! {
            changed = requests.changed() => changed.is_err(),
            () = shutdown.cancelled() => true,
            () = sleep(RETRY), if has_failed => false,
        };
        let number = *requests.borrow_and_update();
        let is_due = has_failed || done.borrow().number < number;
        if is_due {
            let outcome = writes.replace(encode()).await.err();
            if let Some(err) = &outcome {
                error!(path = %writes.file().path().display(), %err, "Failed to write checkpoint");
            }
            done.send_modify(|written| {
                written.number = number;
                if outcome.is_none() {
                    written.saved = number;
                }
                written.error = outcome.map(Arc::new);
            });
        }
        if is_last {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use berth_ports::DiskStateFile;

    use super::*;

    #[tokio::test]
    async fn a_write_is_on_disk_when_it_returns_and_a_failure_is_its_error() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("state/file");
        let (tasks, shutdown) = (TaskTracker::new(), CancellationToken::new());
        let file = Arc::new(DiskStateFile::new(&path));
        let writer = CheckpointWriter::spawn(&tasks, &shutdown, file, || b"content".to_vec());
        let failed = writer.write().await.expect_err("the directory does not exist");
        assert!(failed.starts_with("failed to write checkpoint file: "), "{failed}");
        std::fs::create_dir(directory.path().join("state")).expect("a directory");
        writer.write().await.expect("written");
        assert_eq!(std::fs::read(&path).expect("a file"), b"content");
        std::fs::remove_file(&path).expect("removed");
        writer.request();
        shutdown.cancel();
        tasks.close();
        tasks.wait().await;
        assert!(path.exists(), "the last request is served");
        writer.saved(1).await.expect("a request before the last one");
        assert!(writer.write().await.is_err());
    }
}
