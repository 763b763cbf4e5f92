//! The volume manager of the engine: turns, deadlines and what is told of failures.

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
    desired,
    device::DevicePlugin,
    devices::{Awaited, Devices, Missing, Resolved},
    found,
    hands::{Hands, OF_FILES},
    labels::Labels,
    layout::{self, PodLayout},
    memory::Credentials,
    orphan,
    owner::{Board, BoardDeps},
    plugins::Looked,
    rebuild,
    refused::Refused,
    turns::{Lane, Once, TurnError, Turns},
    waiting::Waiting,
    worlds::Worlds,
};
use berth_metrics::VolumeMetrics;
use berth_ports::{
    ClaimedVolume, ClaimedVolumes, Clock, EventSink, Fullness, MountedVolumes, NodeFacts, ObjectSource, StorageObjects,
    VolumeError, VolumeManager,
};
use berth_types::{Pod, PodUid};

/// Time for all volumes of a pod, up or down.
const VOLUMES_LIMIT: Duration = Duration::from_secs(123);
/// Time for the volumes of a pod that is gone, before its directory is tried another time.
const GONE_LIMIT: Duration = Duration::from_secs(10);
/// Time to find out what an earlier agent left.
const REBUILD_LIMIT: Duration = Duration::from_secs(60);
/// Time to list the directories of all pods.
const LIST_LIMIT: Duration = Duration::from_secs(10);

/// What the manager needs to know.
#[derive(Clone, Debug)]
pub struct VolumesConfig {
    /// The root directory (`--root-dir`).
    pub root: PathBuf,
    /// Where secrets and tokens lie.
    pub credentials: Credentials,
}

/// What the manager needs of others.
pub struct VolumesDeps {
    /// Facts about the node: limits of containers that have none.
    pub facts: watch::Receiver<Arc<NodeFacts>>,
    /// Objects and tokens of the API server.
    pub objects: Arc<dyn ObjectSource>,
    /// Where it is told that a volume cannot be refreshed.
    pub events: Arc<dyn EventSink>,
    /// Wall time.
    pub clock: Arc<dyn Clock>,
    /// What is counted.
    pub metrics: VolumeMetrics,
    /// Claims and what is behind them.
    pub storage: Arc<dyn StorageObjects>,
    /// Kinds of volumes that are more than files.
    pub plugins: Vec<Arc<dyn DevicePlugin>>,
    /// Labels of volumes, on a node that has SELinux.
    pub labels: Option<Labels>,
    /// Which volumes the API server knows to be in use here.
    pub reported: watch::Receiver<Arc<BTreeSet<String>>>,
    /// Hears which volumes are in use; nothing before that is known.
    pub in_use: watch::Sender<Option<Vec<String>>>,
    /// Where tasks are counted.
    pub tasks: TaskTracker,
    /// Ends them.
    pub stop: CancellationToken,
}

/// What lay there, of files and of others.
type Scanned = (Vec<(PodUid, found::Complete)>, io::Result<rebuild::Left>);

/// The volumes of all pods. What is on disk is the state.
pub struct Manager {
    devices: Devices,
    is_rebuilt: OnceCell<()>,
    root: PathBuf,
    credentials: Credentials,
    deps: VolumesDeps,
    turns: Turns,
    /// Lists directories of pods.
    listing: Lane,
    /// Finds out what was left.
    scanning: Once<Scanned>,
    worlds: Worlds,
    looked: Arc<Looked>,
    refused: Refused,
}

impl Manager {
    /// A manager of the directories below the root, which need not exist yet.
    pub fn new(config: VolumesConfig, deps: VolumesDeps) -> Self {
        // The mount table knows paths without links only.
        let root = fs::canonicalize(&config.root).unwrap_or(config.root);
        let worlds = Worlds::new(deps.metrics.clone());
        let refused = Refused::new(deps.metrics.orphans());
        // What hangs with a device leaves the files of all other pods their threads.
        let (hands, files) = (Hands::default(), Hands::new(OF_FILES));
        let board = BoardDeps {
            root: root.clone(),
            facts: deps.facts.clone(),
            storage: deps.storage.clone(),
            reported: deps.reported.clone(),
            events: deps.events.clone(),
            metrics: deps.metrics.clone(),
            tasks: deps.tasks.clone(),
            stop: deps.stop.clone(),
            hands,
        };
        let board = Board::new(board, deps.in_use.clone());
        let devices = Devices::new(board, deps.plugins.clone(), deps.storage.clone(), deps.labels.clone());
        let is_rebuilt = OnceCell::new();
        Self {
            devices,
            is_rebuilt,
            root,
            credentials: config.credentials,
            deps,
            listing: Lane::new(files.clone()),
            scanning: Once::new(files.clone()),
            turns: Turns::new(files),
            worlds,
            looked: Arc::default(),
            refused,
        }
    }

    /// Finds out what an earlier agent left, once; everything else waits for it. What is not known could be undone
    /// under a pod that has it, or removed with it.
    ///
    /// # Errors
    /// It could not be found out yet. The next call tries again.
    pub async fn rebuild(&self) -> Result<(), VolumeError> {
        let scan = self.is_rebuilt.get_or_try_init(async || {
            let (root, plugins) = (self.root.clone(), self.devices.plugins().to_vec());
            let look = move || (found::complete(&root), rebuild::scan(&root, &plugins));
            let (complete, left) = self.scanning.take(REBUILD_LIMIT, look).await.map_err(|e| e.to_string())?;
            let left = left.map_err(|e| e.to_string())?;
            let files: usize = complete.iter().map(|(_, volumes)| volumes.len()).sum();
            info!(volumes = left.volumes.len(), files, failed = left.failed, "Reconstructed volumes");
            self.deps.metrics.rebuilt(left.volumes.len() + files + left.failed, left.failed);
            complete.into_iter().for_each(|(pod, volumes)| self.worlds.found(&pod, volumes));
            self.devices.board().adopt(left.volumes, left.staged, left.failed == 0);
            self.devices.board().synced();
            Ok::<_, String>(())
        });
        // Whoever else waits for the same tells its pod, too.
        let scanned = timeout(REBUILD_LIMIT * 2, scan).await;
        let cause = match scanned {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(cause)) => cause,
            Err(_) => "context deadline exceeded".to_owned(),
        };
        warn!(err = %cause, "What is left of volumes is not known yet");
        Err(VolumeError::Failed(format!("reading what is left of volumes: {cause}")))
    }

    /// Takes down the pod's volumes that are more than files, and waits for it.
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
impl VolumeManager for Manager {
    async fn mount(&self, pod: &Arc<Pod>) -> Result<Arc<MountedVolumes>, VolumeError> {
        self.rebuild().await?;
        let (layout, until) = (self.layout(pod.uid())?, Instant::now() + VOLUMES_LIMIT);
        let used = desired::used(pod);
        let Resolved { local, mut awaited, failed } = self.devices.resolve(pod, &layout, &used).await;
        drop(used); // kilobytes each, while others are waited for
        let mut all = self.set_up(pod, layout, local).await?;
        let refused = |missing: Vec<String>, awaited: &[Awaited], cause: &str| Waiting {
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
        let Missing { volumes: missing, hindrance } = self.devices.wait(pod.uid(), &mut awaited, until).await;
        if let Some(hindrance) = hindrance {
            return Err(VolumeError::Failed(refused(missing, &awaited, &hindrance).to_string()));
        }
        if !missing.is_empty() {
            let mut causes: Vec<String> = awaited.iter().filter_map(|one| one.failure(pod.uid())).collect();
            causes.dedup();
            // Where nobody has tried, somebody else has something to do first.
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
        self.looked.forget(layout.pod());
        let done = flat(self.turns.take(pod, VOLUMES_LIMIT, move || orphan::tear_down(&layout)).await);
        self.worlds.torn_down(pod, done.is_ok(), began.elapsed());
        done
    }

    async fn pods_on_disk(&self) -> Vec<PodUid> {
        let pods = layout::pods(&self.root);
        match self.listing.take(LIST_LIMIT, move || directories(&pods)).await {
            Ok(Ok(found)) => {
                self.refused.swept(&found);
                found
            }
            Ok(Err(e)) => {
                warn!(err = %e, "Could not list the directories of pods");
                Vec::new()
            }
            Err(e) => {
                warn!(err = %e, limit = ?LIST_LIMIT, "Listing the directories of pods did not return");
                Vec::new()
            }
        }
    }

    async fn remove_directory(&self, pod: &PodUid) -> Result<(), VolumeError> {
        if let Some(error) = self.refused.pausing(pod) {
            return Err(VolumeError::Failed(error));
        }
        self.rebuild().await?;
        let layout = self.layout(pod)?;
        self.looked.forget(layout.pod());
        let removed = match self.release(pod, &layout, GONE_LIMIT).await {
            Ok(()) => self.turns.take(pod, VOLUMES_LIMIT, move || orphan::remove_pod(&layout)).await,
            Err(left) => {
                self.refused.refused(pod, &left.to_string());
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
                self.refused.refused(pod, &error);
                Err(VolumeError::Failed(error))
            }
        }
    }
}

#[async_trait]
impl ClaimedVolumes for Manager {
    fn of(&self, pod: &PodUid) -> Vec<ClaimedVolume> {
        self.devices.board().claimed(pod)
    }

    async fn fullness(&self, path: &Path) -> Result<Fullness, String> {
        self.devices.board().fullness(path).await
    }
}

fn flat(done: Result<Result<(), orphan::LeftOver>, TurnError>) -> Result<(), VolumeError> {
    match done {
        Ok(done) => done.map_err(|e| VolumeError::Failed(e.to_string())),
        Err(e) => Err(VolumeError::Failed(e.to_string())),
    }
}

/// The error of a pod whose volumes the node will not get, if that is so.
async fn beyond(awaited: &[Awaited], text: &str) -> Option<VolumeError> {
    let asked = join_all(awaited.iter().map(Awaited::is_over_limit)).await;
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
