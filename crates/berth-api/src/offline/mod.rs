//! What it takes to start the last-known pods again after a reboot, while the API server cannot be
//! asked. Opt-in: section `offlinePods` of the agent's own settings.
//!
//! ```text
//!  sets of pods ────┐                                    ┌─► file, encrypted
//!  objects read ────┼─► keeper (one task) ─► sealed ─────┤
//!  services, classes┘                                    └─► at the next start: pods, objects
//! ```
//!
//! The keeper owns what is known and writes it when it changes, at most every few seconds. What was known
//! at start is read once and never changes; it is offered only until the API server has told a full set,
//! and objects out of it only where the server cannot be asked. A node that was emptied meanwhile runs its
//! old pods until then: that is what is opted into.

mod keeper;
mod known;
mod objects;
mod seal;

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
    keeper::Keeper,
    known::{Known, Learned},
    seal::Sealer,
};
use berth_sys::atomic_file;
use berth_types::Pod;

pub use objects::OfflineObjects;
pub use seal::SealError;

/// What can wait to be learned; what comes while that is full is learned the next time it is read.
const QUEUE: usize = 1024;

/// Where it lies.
#[derive(Clone, Debug)]
pub struct OfflineConfig {
    /// The file.
    pub file: PathBuf,
    /// Its key: 32 bytes, or 64 hexadecimal digits; for its owner alone.
    pub key_file: PathBuf,
    /// The node's name: another node's file is not taken.
    pub node: String,
}

/// The last-known pods and what they need.
pub struct Offline {
    last: Known,
    learn: mpsc::Sender<Learned>,
    /// Whether the last-known pods run, because nobody has told others yet.
    is_recalling: AtomicBool,
}

impl Offline {
    /// Reads what was known, and keeps what is learned until stopped. A file that cannot be used is told and
    /// counts as none.
    ///
    /// # Errors
    /// The key cannot be used.
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
        let keeper = Keeper::new(last.clone(), sealer, config.file, learned);
        tasks.spawn(keeper.run(stop));
        Ok(Arc::new(Self { last, learn, is_recalling: AtomicBool::new(false) }))
    }

    /// The pods to run while nobody tells others; `None` where none are known. From now on what they need
    /// is recalled as well.
    pub fn recall_pods(&self) -> Option<Vec<Arc<Pod>>> {
        if self.last.pods.is_empty() {
            return None;
        }
        self.is_recalling.store(true, Ordering::Relaxed);
        warn!(pods = self.last.pods.len(), "The API server cannot be asked; running the last-known pods");
        Some(self.last.pods.iter().filter_map(|pod| Pod::new((**pod).clone()).ok()).map(Arc::new).collect())
    }

    /// The API server told this full set.
    pub fn saw_pods(&self, pods: &[Arc<Pod>]) {
        if self.is_recalling.swap(false, Ordering::Relaxed) {
            info!("The API server told its pods; the last-known ones are of no more use");
        }
        self.learn(Learned::Pods(pods.to_vec()));
    }

    fn is_recalling(&self) -> bool {
        self.is_recalling.load(Ordering::Relaxed)
    }

    fn learn(&self, learned: Learned) {
        // Full, or stopping: it is learned the next time.
        let _ = self.learn.try_send(learned);
    }
}

/// What lies there; nothing where it cannot be used.
fn read(sealer: &Sealer, file: &std::path::Path) -> Known {
    let content = match atomic_file::read(file) {
        Ok(Some(content)) => content,
        Ok(None) => return Known::default(),
        Err(error) => {
            error!(path = %file.display(), err = %error, "Cannot read the last-known pods");
            return Known::default();
        }
    };
    let opened = sealer.unseal(content).map_err(|e| e.to_string());
    opened.and_then(|plain| Known::decode(&plain).map_err(|e| e.to_string())).unwrap_or_else(|error| {
        error!(path = %file.display(), err = error, "Cannot use the last-known pods");
        Known::default()
    })
}

#[cfg(test)]
mod tests;
