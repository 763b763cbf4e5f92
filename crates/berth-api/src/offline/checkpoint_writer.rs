//! Checkpoint writer of last-known pods: owns the data in memory and writes it, debounced.

use std::{path::PathBuf, sync::Arc, time::Duration};

use sha2::{Digest, Sha256};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::error;

use super::{
    checkpoint::{Checkpoint, CheckpointUpdate},
    encryption::Sealer,
};
use berth_sys::atomic_file;

/// Debounce interval between a change and its write.
pub const COLLECT: Duration = Duration::from_secs(5);
/// Readable by the agent's user only.
const MODE: u32 = 0o600;

/// Task that owns and writes the checkpoint.
pub struct CheckpointWriter {
    known: Checkpoint,
    sealer: Arc<Sealer>,
    file: PathBuf,
    learned: mpsc::Receiver<CheckpointUpdate>,
    /// Time of the next write; `None`: nothing to write.
    due: Option<Instant>,
    /// Digest of the last written checkpoint.
    digest: Option<[u8; 32]>,
    complaint: Option<String>,
}

impl CheckpointWriter {
    /// Returns a writer that starts with the data of the last checkpoint.
    pub fn new(known: Checkpoint, sealer: Sealer, file: PathBuf, learned: mpsc::Receiver<CheckpointUpdate>) -> Self {
        Self { known, sealer: Arc::new(sealer), file, learned, due: None, digest: None, complaint: None }
    }

    /// Runs until stopped; writes pending changes then.
    pub async fn run(mut self, stop: CancellationToken) {
        loop {
            let due = self.due;
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                () = at(due) => self.write().await,
                learned = self.learned.recv() => match learned {
                    Some(learned) => self.learn(learned),
                    None => break,
                },
            }
        }
        while let Ok(learned) = self.learned.try_recv() {
            self.learn(learned);
        }
        if self.due.is_some() {
            self.write().await;
        }
    }

    fn learn(&mut self, learned: CheckpointUpdate) {
        if self.known.apply(learned) && self.due.is_none() {
            self.due = Some(Instant::now() + COLLECT);
        }
    }

    async fn write(&mut self) {
        self.due = None;
        let (known, sealer, file, last) = (self.known.clone(), self.sealer.clone(), self.file.clone(), self.digest);
        let written = tokio::task::spawn_blocking(move || {
            let plain = known.encode().map_err(|e| e.to_string())?;
            let digest: [u8; 32] = Sha256::digest(&plain).into();
            if last != Some(digest) {
                let sealed = sealer.seal(&plain).map_err(|e| e.to_string())?;
                if let Some(directory) = file.parent() {
                    std::fs::create_dir_all(directory).map_err(|e| e.to_string())?;
                }
                atomic_file::replace(&file, &sealed, MODE).map_err(|e| format!("{}: {e}", file.display()))?;
            }
            Ok(digest)
        });
        let complaint = match written.await.map_err(|e| e.to_string()).flatten() {
            Ok(digest) => {
                self.digest = Some(digest);
                None
            }
            Err(error) => {
                self.due = Some(Instant::now() + COLLECT);
                Some(error)
            }
        };
        if complaint != self.complaint
            && let Some(error) = &complaint
        {
            error!(err = error, "Failed to write pod checkpoint");
        }
        self.complaint = complaint;
    }
}

async fn at(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
        None => std::future::pending().await,
    }
}
