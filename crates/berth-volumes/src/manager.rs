//! Implementation of the `VolumeManager` port: serialization per pod, deadlines, and error messages.

mod files;

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use futures::future::join_all;
use tokio::{
    sync::{OnceCell, watch},
    time::{Instant, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{info, warn};

use super::{
    attachable::AttachableVolumePlugin,
    blocking_pools, desired_volumes,
    labels::LabelPolicy,
    layout::{self, PodLayout},
    memory::CredentialStorage,
    mount_wait::MountWaitError,
    orphan,
    orphan_backoff::OrphanBackoff,
    pending_operations::{Once, PendingOperationError, PendingOperations, SerialQueue},
    plugins::VerifiedCache,
    pod_volumes::{MissingVolumes, PendingVolume, PodVolumes, ResolvedVolumes},
    rebuild, rebuild_files,
    reconciler::{ReconcilerDeps, ReconcilerRegistry},
    state_of_world::StateOfWorld,
};
use berth_metrics::VolumeMetrics;
use berth_ports::{
    ClaimedVolume, ClaimedVolumes, Clock, EventSink, MountedVolumes, NodeFacts, ObjectSource, StorageObjects,
    VolumeError, VolumeManager, VolumeStats,
};
use berth_types::{Pod, PodUid};

/// Timeout for setting up or tearing down all volumes of a pod.
const VOLUMES_LIMIT: Duration = Duration::from_secs(123);
/// Timeout for releasing the volumes of an orphaned pod before its directory is retried later.
const GONE_LIMIT: Duration = Duration::from_secs(10);
/// Timeout for reconstructing volumes from disk.
const REBUILD_LIMIT: Duration = Duration::from_secs(60);
/// Timeout for listing the directories of all pods.
const LIST_LIMIT: Duration = Duration::from_secs(10);

/// Configuration of the volume manager.
#[derive(Clone, Debug)]
pub struct VolumesConfig {
    /// Root directory (`--root-dir`).
    pub root: PathBuf,
    /// Where volumes with secrets and tokens are stored.
    pub credentials: CredentialStorage,
}

/// Dependencies of the volume manager.
pub struct VolumesDeps {
    /// Node facts: allocatable resources are the limits of containers that set none.
    pub facts: watch::Receiver<Arc<NodeFacts>>,
    /// Objects and tokens from the API server.
    pub objects: Arc<dyn ObjectSource>,
    /// Sink for events about volumes that cannot be refreshed.
    pub events: Arc<dyn EventSink>,
    /// Wall-clock time.
    pub clock: Arc<dyn Clock>,
    /// Volume metrics.
    pub metrics: VolumeMetrics,
    /// Access to claims and persistent volumes.
    pub storage: Arc<dyn StorageObjects>,
    /// Plugins of volumes that need an owner task.
    pub plugins: Vec<Arc<dyn AttachableVolumePlugin>>,
    /// SELinux label policy; `None` on a node without SELinux.
    pub labels: Option<LabelPolicy>,
    /// Volumes that the API server lists in `node.status.volumesInUse`.
    pub reported: watch::Receiver<Arc<BTreeSet<String>>>,
    /// Receives the names of volumes in use; `None` until they are known.
    pub in_use: watch::Sender<Option<Vec<String>>>,
    /// Tracker of spawned tasks.
    pub tasks: TaskTracker,
    /// Stops all tasks.
    pub stop: CancellationToken,
}

/// Result of the scan at startup: file-based volumes, and volumes that need an owner task.
type StartupScan = (Vec<(PodUid, rebuild_files::Complete)>, io::Result<rebuild::ScanResult>);

/// Volume manager for all pods. The authoritative state is on disk.
pub struct PodVolumeManager {
    devices: PodVolumes,
    is_rebuilt: OnceCell<()>,
    root: PathBuf,
    credentials: CredentialStorage,
    deps: VolumesDeps,
    turns: PendingOperations,
    /// Serializes listings of pod directories.
    listing: SerialQueue,
    /// Runs the scan for volumes of an earlier agent.
    scanning: Once<StartupScan>,
    worlds: StateOfWorld,
    verified: Arc<VerifiedCache>,
    refused: OrphanBackoff,
}

impl PodVolumeManager {
    /// Creates a manager of the directories below the root, which need not exist yet.
    pub fn new(config: VolumesConfig, deps: VolumesDeps) -> Self {
        // The mount table contains only paths without symlinks.
        let root = fs::canonicalize(&config.root).unwrap_or(config.root);
        let worlds = StateOfWorld::new(deps.metrics.clone());
        let refused = OrphanBackoff::new(deps.metrics.orphans());
        // Separate pools: hanging devices leave threads for the file-based volumes of all other pods.
        let files = blocking_pools::files();
        let board = ReconcilerDeps {
            root: root.clone(),
            facts: deps.facts.clone(),
            storage: deps.storage.clone(),
            reported: deps.reported.clone(),
            events: deps.events.clone(),
            metrics: deps.metrics.clone(),
            tasks: deps.tasks.clone(),
            stop: deps.stop.clone(),
            pool: blocking_pools::operations(),
        };
        let board = ReconcilerRegistry::new(board, deps.in_use.clone());
        let devices = PodVolumes::new(board, deps.plugins.clone(), deps.storage.clone(), deps.labels.clone());
        let is_rebuilt = OnceCell::new();
        Self {
            devices,
            is_rebuilt,
            root,
            credentials: config.credentials,
            deps,
            listing: SerialQueue::new(files.clone()),
            scanning: Once::new(files.clone()),
            turns: PendingOperations::new(files),
            worlds,
            verified: Arc::default(),
            refused,
        }
    }

    /// Reconstructs the volumes of an earlier agent, once; all other calls wait for it. An unknown volume could be
    /// unmounted or removed while a pod uses it.
    ///
    /// # Errors
    /// If the reconstruction is incomplete. The next call retries.
    pub async fn rebuild(&self) -> Result<(), VolumeError> {
        let scan = self.is_rebuilt.get_or_try_init(async || {
            let (root, plugins) = (self.root.clone(), self.devices.plugins().to_vec());
            let scan_disk = move || (rebuild_files::complete(&root), rebuild::scan(&root, &plugins));
            let (complete, left) = self.scanning.take(REBUILD_LIMIT, scan_disk).await.map_err(|e| e.to_string())?;
            let left = left.map_err(|e| e.to_string())?;
            let files: usize = complete.iter().map(|(_, volumes)| volumes.len()).sum();
            info!(volumes = left.volumes.len(), files, failed = left.failed, "Reconstructed volumes");
            self.deps.metrics.rebuilt(left.volumes.len() + files + left.failed, left.failed);
            complete.into_iter().for_each(|(pod, volumes)| self.worlds.adopt_complete(&pod, volumes));
            self.devices.board().adopt(left.volumes, left.staged, left.failed == 0);
            self.devices.board().synced();
            Ok::<_, String>(())
        });
        // Bounded, because the caller may wait for another caller's scan and must report that for its own pod.
        let scanned = timeout(REBUILD_LIMIT * 2, scan).await;
        let cause = match scanned {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(cause)) => cause,
            Err(_) => "context deadline exceeded".to_owned(),
        };
        warn!(err = %cause, "Volume reconstruction is not complete");
        Err(VolumeError::Failed(format!("reconstructing volumes: {cause}")))
    }

    /// Releases the pod's volumes that have an owner task, and waits for their removal.
    async fn release(&self, pod: &PodUid, layout: &PodLayout, limit: Duration) -> Result<(), VolumeError> {
        if !self.devices.has(pod) {
            self.devices.forget(pod);
            return Ok(());
        }
        let sub_paths = layout.clone();
        let cleaned = self.turns.take(pod, limit, move || orphan::unmount_sub_paths(&sub_paths)).await;
        let failed = |cause: String| VolumeError::Failed(format!("error cleaning subPath mounts: {cause}"));
        match cleaned {
            Ok(cleaned) => cleaned.map_err(|e| failed(e.to_string()))?,
            Err(e) => return Err(failed(e.to_string())),
        }
        let left = self.devices.release(pod, Instant::now() + limit).await;
        left.map_err(|names| {
            VolumeError::Failed(format!("mounted volumes=[{}]: context deadline exceeded", names.join(" ")))
        })
    }

    fn layout(&self, pod: &PodUid) -> Result<PodLayout, VolumeError> {
        PodLayout::new(&self.root, pod).map_err(|e| VolumeError::Failed(e.to_string()))
    }
}

#[async_trait]
impl VolumeManager for PodVolumeManager {
    async fn mount(&self, pod: &Arc<Pod>) -> Result<Arc<MountedVolumes>, VolumeError> {
        self.rebuild().await?;
        let (layout, until) = (self.layout(pod.uid())?, Instant::now() + VOLUMES_LIMIT);
        let used = desired_volumes::used(pod);
        let ResolvedVolumes { local, mut awaited, failed } = self.devices.resolve(pod, &layout, &used).await;
        drop(used); // frees kilobytes per volume before waiting
        let mut all = self.set_up(pod, layout, local).await?;
        let refused = |missing: Vec<String>, awaited: &[PendingVolume], cause: &str| MountWaitError {
            unattached: awaited.iter().filter(|one| one.is_unattached()).map(|one| one.volume.clone()).collect(),
            missing,
            failed: failed.iter().map(|(name, _)| name.clone()).collect(),
            cause: cause.to_owned(),
        };
        if !failed.is_empty() {
            let missing = self.devices.wait(pod.uid(), &mut awaited, Instant::now()).await;
            let missing = missing.volumes.into_iter().chain(failed.iter().map(|(name, _)| name.clone())).collect();
            let mut causes: Vec<&str> = failed.iter().map(|(_, cause)| cause.as_str()).collect();
            causes.sort_unstable();
            causes.dedup();
            let text = refused(missing, &awaited, &causes.join("; ")).to_string();
            return Err(beyond(&awaited, &text).await.unwrap_or(VolumeError::Failed(text)));
        }
        let MissingVolumes { volumes: missing, hindrance } = self.devices.wait(pod.uid(), &mut awaited, until).await;
        if let Some(hindrance) = hindrance {
            return Err(VolumeError::Failed(refused(missing, &awaited, &hindrance).to_string()));
        }
        if !missing.is_empty() {
            let mut causes: Vec<String> = awaited.iter().filter_map(|one| one.failure(pod.uid())).collect();
            causes.dedup();
            // Without any attempt, another component (such as the attach/detach controller) must act first.
            let cause = if causes.is_empty() { "context deadline exceeded".to_owned() } else { causes.join("; ") };
            let text = refused(missing, &awaited, &cause).to_string();
            return Err(beyond(&awaited, &text).await.unwrap_or(VolumeError::TimedOut(text)));
        }
        let mounted = Arc::make_mut(&mut all);
        awaited.iter().for_each(|one| one.put(pod.uid(), mounted));
        Ok(all)
    }

    async fn unmount(&self, pod: &PodUid) -> Result<(), VolumeError> {
        self.rebuild().await?;
        let layout = self.layout(pod)?;
        let began = Instant::now();
        self.release(pod, &layout, VOLUMES_LIMIT).await?;
        self.verified.forget(layout.pod());
        let done = flat(self.turns.take(pod, VOLUMES_LIMIT, move || orphan::tear_down(&layout)).await);
        self.worlds.record_teardown(pod, done.is_ok(), began.elapsed());
        done
    }

    async fn pods_on_disk(&self) -> Vec<PodUid> {
        let pods = layout::pods(&self.root);
        match self.listing.take(LIST_LIMIT, move || directories(&pods)).await {
            Ok(Ok(found)) => {
                self.refused.start_sweep(&found);
                found
            }
            Ok(Err(e)) => {
                warn!(err = %e, "Failed to list pod directories");
                Vec::new()
            }
            Err(e) => {
                warn!(err = %e, limit = ?LIST_LIMIT, "Listing pod directories timed out");
                Vec::new()
            }
        }
    }

    async fn remove_directory(&self, pod: &PodUid) -> Result<(), VolumeError> {
        if let Some(error) = self.refused.error_in_backoff(pod) {
            return Err(VolumeError::Failed(error));
        }
        self.rebuild().await?;
        let layout = self.layout(pod)?;
        self.verified.forget(layout.pod());
        let removed = match self.release(pod, &layout, GONE_LIMIT).await {
            Ok(()) => self.turns.take(pod, VOLUMES_LIMIT, move || orphan::remove_pod(&layout)).await,
            Err(left) => {
                self.refused.record_failure(pod, &left.to_string());
                return Err(left);
            }
        };
        let removed = removed.map_err(|e| e.to_string()).and_then(|done| done.map_err(|e| e.to_string()));
        match removed {
            Ok(had_volumes) => {
                self.refused.removed(pod, had_volumes);
                self.worlds.removed(pod);
                info!(podUID = %pod, "Cleaned up orphaned pod volumes dir");
                Ok(())
            }
            Err(error) => {
                self.refused.record_failure(pod, &error);
                Err(VolumeError::Failed(error))
            }
        }
    }
}

#[async_trait]
impl ClaimedVolumes for PodVolumeManager {
    fn of(&self, pod: &PodUid) -> Vec<ClaimedVolume> {
        self.devices.board().claimed(pod)
    }

    async fn usage(&self, path: &Path) -> Result<VolumeStats, String> {
        self.devices.board().fullness(path).await
    }
}

fn flat(done: Result<Result<(), orphan::TeardownError>, PendingOperationError>) -> Result<(), VolumeError> {
    match done {
        Ok(done) => done.map_err(|e| VolumeError::Failed(e.to_string())),
        Err(e) => Err(VolumeError::Failed(e.to_string())),
    }
}

/// Returns the error of a pod whose volumes exceed the node's attach limit, if that is the case.
async fn beyond(awaited: &[PendingVolume], text: &str) -> Option<VolumeError> {
    let asked = join_all(awaited.iter().map(PendingVolume::is_over_limit)).await;
    let text = format!("Node has reached its volume attachment limit, rejecting pod. {text}");
    asked.contains(&true).then_some(VolumeError::LimitExceeded(text))
}

fn directories(pods: &Path) -> io::Result<Vec<PodUid>> {
    let entries = match fs::read_dir(pods) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir()
            && let Some(name) = entry.file_name().to_str()
        {
            found.push(PodUid::from(name));
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests;
