//! Persisted image ages: first detection and last use, across restarts (spec 03b §15 item 6).

use std::{collections::BTreeMap, io, path::PathBuf, time::Duration};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::{
    task::{JoinHandle, spawn_blocking},
    time::timeout,
};
use tracing::{debug, warn};

use berth_sys::atomic_file;

/// Timeout of one disk operation.
const DEADLINE: Duration = Duration::from_secs(10);

/// When an image was first detected and last used; content of the state file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Ages {
    #[serde(rename = "firstDetected")]
    pub(super) first_detected: Timestamp,
    #[serde(rename = "lastUsed", default, skip_serializing_if = "Option::is_none")]
    pub(super) last_used: Option<Timestamp>,
}

/// The state file.
pub(super) struct AgesFile {
    path: PathBuf,
    /// A write that hangs: no other write is started until it returns.
    saving: Option<JoinHandle<io::Result<()>>>,
}

impl AgesFile {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, saving: None }
    }

    /// Ages by image from an earlier agent; empty if they cannot be read.
    pub(super) async fn load(&self) -> BTreeMap<String, Ages> {
        let path = self.path.clone();
        let task = spawn_blocking(move || atomic_file::read(&path));
        let data = match timeout(DEADLINE, task).await {
            Ok(Ok(Ok(data))) => data,
            _ => None,
        };
        match data.map(|data| serde_json::from_slice(&data)) {
            Some(Ok(ages)) => ages,
            Some(Err(error)) => {
                warn!(err = %error, "Failed to parse image ages, starting with an empty list");
                BTreeMap::new()
            }
            None => BTreeMap::new(),
        }
    }

    /// Writes the ages, unless an earlier write hangs; the next save retries.
    pub(super) async fn save(&mut self, ages: &BTreeMap<String, Ages>) {
        if self.saving.as_ref().is_some_and(|saving| !saving.is_finished()) {
            return debug!("Skipping save of image ages, a previous save is still in progress");
        }
        let (path, ages) = (self.path.clone(), ages.clone());
        let mut task = spawn_blocking(move || atomic_file::replace(&path, &serde_json::to_vec(&ages)?, 0o600));
        match timeout(DEADLINE, &mut task).await {
            Ok(Ok(Ok(()))) => {}
            Ok(Ok(Err(error))) => warn!(err = %error, "Failed to save image ages"),
            Ok(Err(error)) => warn!(err = %error, "Failed to save image ages"),
            Err(_) => {
                warn!("Timed out saving image ages");
                self.saving = Some(task);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_write_that_hangs_is_not_followed_by_another() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut file = AgesFile::new(dir.path().join("ages"));
        let (release, hang) = mpsc::channel::<()>();
        file.saving = Some(spawn_blocking(move || {
            let _ = hang.recv(); // no sender
            Ok(())
        }));
        let ages: BTreeMap<_, _> =
            [("a".to_owned(), Ages { first_detected: Timestamp::UNIX_EPOCH, last_used: None })].into();
        file.save(&ages).await;
        assert!(file.load().await.is_empty());
        drop(release);
        while file.saving.as_ref().is_some_and(|saving| !saving.is_finished()) {
            tokio::task::yield_now().await;
        }
        file.save(&ages).await;
        assert_eq!(file.load().await, ages);
    }
}
