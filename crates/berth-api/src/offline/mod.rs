//! Offline start after a reboot: checkpoint of the last-known pods for API server outages.
//!
//! Opt-in: section `offlinePods` of the agent's own settings.
//!
//! ```text
//!  sets of pods ────┐                                    ┌─► file, encrypted
//!  objects read ────┼─► writer (one task) ─► sealed ─────┤
//!  services, classes┘                                    └─► at the next start: pods, objects
//! ```
//!
//! The writer task owns the current data and writes changes, at most every few seconds. The checkpoint is read once at
//! start and never changes. It is used only until the API server has delivered a full set of pods, and its objects only
//! where the server cannot be reached. A node whose pods were deleted meanwhile runs its old pods until then: that is
//! what the operator opts into.

mod checkpoint;
mod checkpoint_writer;
mod encryption;
mod objects;

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use tokio::sync::mpsc;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{error, info, warn};

use self::{
    checkpoint::{Checkpoint, CheckpointUpdate},
    checkpoint_writer::CheckpointWriter,
    encryption::Sealer,
};
use berth_sys::atomic_file;
use berth_types::Pod;

pub use encryption::SealError;
pub use objects::OfflineObjects;

/// Capacity of the observation queue; an observation that finds it full is recorded at its next read.
const QUEUE: usize = 1024;

/// Configuration of offline starts.
#[derive(Clone, Debug)]
pub struct OfflineConfig {
    /// Path of the checkpoint.
    pub file: PathBuf,
    /// Path of the encryption key: 32 bytes, or 64 hexadecimal digits; must be accessible by its owner only.
    pub key_file: PathBuf,
    /// Name of this node; the checkpoint of another node is rejected.
    pub node: String,
}

/// Last-known pods and the objects they reference.
pub struct Offline {
    last: Checkpoint,
    learn: mpsc::Sender<CheckpointUpdate>,
    /// Whether the last-known pods run because the API server has not delivered any yet.
    is_recalling: AtomicBool,
}

impl Offline {
    /// Reads the checkpoint, and records observations until stopped. An unusable checkpoint is logged and treated as
    /// absent.
    ///
    /// # Errors
    /// The encryption key is unusable.
    pub async fn start(
        config: OfflineConfig,
        tasks: &TaskTracker,
        stop: CancellationToken,
    ) -> Result<Arc<Self>, SealError> {
        let (file, key_file, node) = (config.file.clone(), config.key_file, config.node);
        let reading = tokio::task::spawn_blocking(move || {
            let sealer = Sealer::open(&key_file, &node)?;
            let last = read(&sealer, &file);
            Ok((sealer, last))
        });
        let (sealer, last) = reading.await.map_err(|error| SealError::Task(error.to_string()))??;
        let (learn, learned) = mpsc::channel(QUEUE);
        let writer = CheckpointWriter::new(last.clone(), sealer, config.file, learned);
        tasks.spawn(writer.run(stop));
        Ok(Arc::new(Self { last, learn, is_recalling: AtomicBool::new(false) }))
    }

    /// Last-known pods to run until the API server delivers its pods; `None` if there are none. From now on the objects
    /// they reference are served from the checkpoint as well.
    pub fn last_known_pods(&self) -> Option<Vec<Arc<Pod>>> {
        if self.last.pods.is_empty() {
            return None;
        }
        self.is_recalling.store(true, Ordering::Relaxed);
        warn!(pods = self.last.pods.len(), "API server is unreachable, running pods from checkpoint");
        Some(self.last.pods.iter().filter_map(|pod| Pod::new((**pod).clone()).ok()).map(Arc::new).collect())
    }

    /// Records a full set of pods from the API server; ends the use of the checkpoint.
    pub fn record_pods(&self, pods: &[Arc<Pod>]) {
        if self.is_recalling.swap(false, Ordering::Relaxed) {
            info!("Received pods from the API server, no longer using pod checkpoint");
        }
        self.learn(CheckpointUpdate::Pods(pods.to_vec()));
    }

    fn is_recalling(&self) -> bool {
        self.is_recalling.load(Ordering::Relaxed)
    }

    fn learn(&self, learned: CheckpointUpdate) {
        // The queue is full, or the agent stops: the next read records it.
        let _ = self.learn.try_send(learned);
    }
}

/// Reads the checkpoint; empty if it is absent or unusable.
fn read(sealer: &Sealer, file: &std::path::Path) -> Checkpoint {
    let content = match atomic_file::read(file) {
        Ok(Some(content)) => content,
        Ok(None) => return Checkpoint::default(),
        Err(error) => {
            error!(path = %file.display(), err = %error, "Failed to read pod checkpoint");
            return Checkpoint::default();
        }
    };
    let opened = sealer.unseal(content).map_err(|e| e.to_string());
    opened.and_then(|plain| Checkpoint::decode(&plain).map_err(|e| e.to_string())).unwrap_or_else(|error| {
        error!(path = %file.display(), err = error, "Ignoring invalid pod checkpoint");
        Checkpoint::default()
    })
}

#[cfg(test)]
mod tests;
