//! Container checkpoints: archives below the agent's directory, limited in number, age, and size.
//!
//! kubelet deletes none and writes as many as requested, which fills the disk (CVE-2025-0426). Berth runs at most one
//! checkpoint per container and two per node; before each one it deletes old archives, and the oldest ones until the
//! rest is below the size limit. A checkpoint runs as its own task: the runtime continues to write whether or not the
//! client waits. Implements spec 04 §5.5, §10.

use std::{
    collections::BTreeSet,
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use jiff::{Timestamp, tz::TimeZone};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{info, warn};

use berth_cri::RuntimeService;
use berth_ports::{Clock, PodObserver};
use berth_server::ports::{CheckpointError, Checkpoints};
use berth_types::{ContainerId, Pod, PodUid};

/// Minimum timeout of a checkpoint.
const LEAST_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum number of concurrent checkpoints.
const AT_ONCE: usize = 2;
/// Maximum age of an archive.
const KEPT: Duration = Duration::from_secs(7 * 24 * 3600);
/// Maximum total size of all archives in bytes when the next checkpoint begins.
const MOST_BYTES: u64 = 10 << 30;

/// Dependencies of the checkpoint endpoint.
pub struct CheckpointDeps {
    /// Container runtime.
    pub cri: Arc<dyn RuntimeService>,
    /// Observed state of the pods.
    pub observer: Arc<dyn PodObserver>,
    /// Wall clock.
    pub clock: Arc<dyn Clock>,
    /// Root directory of the agent.
    pub root: PathBuf,
    /// `runtimeRequestTimeout`.
    pub request_timeout: Duration,
    /// Tracker that spawns the checkpoint tasks.
    pub tasks: TaskTracker,
    /// Cancels running checkpoints.
    pub stop: CancellationToken,
}

/// Writes checkpoints through the runtime.
pub struct RuntimeCheckpoints {
    deps: CheckpointDeps,
    busy: Arc<Mutex<BTreeSet<(PodUid, String)>>>,
}

impl RuntimeCheckpoints {
    /// Creates the endpoint without running checkpoints.
    pub fn new(deps: CheckpointDeps) -> Self {
        Self { deps, busy: Arc::default() }
    }

    fn running(&self, pod: &PodUid, container: &str) -> Option<ContainerId> {
        let pod = self.deps.observer.known_pod(pod)?;
        pod.running().find(|running| &*running.name == container).map(|running| running.id.clone())
    }

    /// Creates the directory, removes surplus archives, and returns an unused path; names have a resolution of one
    /// second.
    async fn prepare_path(&self, pod: &Pod, container: &str) -> io::Result<PathBuf> {
        let (folder, now) = (self.deps.root.join("checkpoints"), self.deps.clock.now());
        let time = now.to_zoned(TimeZone::system()).strftime("%Y-%m-%dT%H:%M:%S%:z").to_string();
        let time = time.strip_suffix("+00:00").map_or(time.clone(), |utc| format!("{utc}Z"));
        let path = folder.join(format!("checkpoint-{}_{}-{container}-{time}.tar", pod.name(), pod.namespace()));
        let at = path.clone();
        let made = tokio::task::spawn_blocking(move || {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
            if at.exists() {
                return Err(io::Error::other(format!("{} already exists", at.display())));
            }
            collect(&folder, now)
        });
        made.await.map_err(io::Error::other)??;
        Ok(path)
    }
}

#[async_trait]
impl Checkpoints for RuntimeCheckpoints {
    async fn checkpoint(
        &self,
        pod: &Arc<Pod>,
        container: &str,
        timeout: Option<i64>,
    ) -> Result<String, CheckpointError> {
        let failed = CheckpointError::Failed;
        let Ok(seconds) = u64::try_from(timeout.unwrap_or(0)) else {
            return Err(failed("CheckpointContainer requires the timeout value to be > 0".to_owned()));
        };
        let turn = CheckpointPermit::take(&self.busy, pod.uid(), container).ok_or(CheckpointError::Busy)?;
        let id =
            self.running(pod.uid(), container).ok_or_else(|| failed(format!("container {container} not found")))?;
        let path = self.prepare_path(pod, container).await.map_err(|error| failed(error.to_string()))?;
        let timeout = Duration::from_secs(seconds).max(self.deps.request_timeout).max(LEAST_TIMEOUT);
        let shown = path.display().to_string();
        let (cri, stop, location) = (self.deps.cri.clone(), self.deps.stop.clone(), shown.clone());
        let writing = self.deps.tasks.spawn(berth_otel::in_current_span(async move {
            let _turn = turn;
            tokio::select! {
                biased;
                () = stop.cancelled() => Err("agent is shutting down".to_owned()),
                written = cri.checkpoint_container(id.as_str(), &location, timeout) => written.map_err(|e| e.to_string()),
            }
        }));
        writing.await.map_err(|error| failed(error.to_string()))?.map_err(failed)?;
        info!(pod = %pod.object_name(), containerName = container, path = shown, "Checkpointed container");
        Ok(shown)
    }
}

/// Permit to checkpoint a container, released on drop.
struct CheckpointPermit {
    busy: Arc<Mutex<BTreeSet<(PodUid, String)>>>,
    who: (PodUid, String),
}

impl CheckpointPermit {
    fn take(busy: &Arc<Mutex<BTreeSet<(PodUid, String)>>>, pod: &PodUid, container: &str) -> Option<Self> {
        let who = (pod.clone(), container.to_owned());
        let mut list = busy.lock().unwrap_or_else(PoisonError::into_inner);
        let is_free = list.len() < AT_ONCE && list.insert(who.clone());
        is_free.then(|| Self { busy: busy.clone(), who })
    }
}

impl Drop for CheckpointPermit {
    fn drop(&mut self) {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.who);
    }
}

/// Existing archive.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Archive {
    path: PathBuf,
    written: SystemTime,
    bytes: u64,
}

/// Deletes archives above the age and size limits.
fn collect(folder: &Path, now: Timestamp) -> io::Result<()> {
    let mut archives = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        if metadata.is_file() {
            archives.push(Archive { path: entry.path(), written: metadata.modified()?, bytes: metadata.len() });
        }
    }
    for archive in surplus(archives, now.into()) {
        match std::fs::remove_file(&archive) {
            Ok(()) => info!(path = %archive.display(), "Removed checkpoint"),
            Err(error) => warn!(path = %archive.display(), err = %error, "Failed to remove checkpoint"),
        }
    }
    Ok(())
}

/// Archives to delete: those above the maximum age, and the oldest ones above the total size.
fn surplus(mut archives: Vec<Archive>, now: SystemTime) -> Vec<PathBuf> {
    archives.sort_by(|a, b| b.written.cmp(&a.written).then_with(|| a.path.cmp(&b.path)));
    let mut sum = 0_u64;
    let goes = |archive: &Archive| {
        sum = sum.saturating_add(archive.bytes);
        let age = now.duration_since(archive.written).unwrap_or_default();
        age > KEPT || sum > MOST_BYTES
    };
    archives.into_iter().filter(goes).map(|archive| archive.path).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_archives_go_and_the_oldest_of_too_many() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(100 * 24 * 3600);
        let archive = |name: &str, days: u32, gib: u64| Archive {
            path: name.into(),
            written: now - Duration::from_secs(24 * 3600) * days,
            bytes: gib << 30,
        };
        for (archives, gone) in [
            (vec![archive("a", 0, 1), archive("b", 6, 1)], vec![]),
            (vec![archive("a", 0, 1), archive("b", 8, 1)], vec!["b"]),
            (vec![archive("a", 1, 6), archive("b", 2, 3), archive("c", 3, 3)], vec!["c"]),
            (vec![archive("huge", 0, 11), archive("b", 1, 1)], vec!["huge", "b"]),
        ] {
            let gone: Vec<PathBuf> = gone.into_iter().map(PathBuf::from).collect();
            assert_eq!(surplus(archives, now), gone);
        }
    }

    #[test]
    fn a_container_has_one_turn_and_a_node_two() {
        let busy = Arc::default();
        let take = |container: &str| CheckpointPermit::take(&busy, &PodUid::from("u"), container);
        let first = take("a").expect("free");
        assert!(take("a").is_none(), "once at a time");
        let second = take("b").expect("free");
        assert!(take("c").is_none(), "two of a node");
        drop(first);
        assert!(take("a").is_some());
        drop(second);
    }
}
