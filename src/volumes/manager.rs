//! The volume manager of the engine: turns, deadlines and what is told of failures.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, DirBuilder},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use jiff::Timestamp;
use tokio::{sync::watch, time::Instant};
use tracing::{info, warn};

use super::{
    desired,
    fetched::{self, Fetched},
    held,
    layout::{self, PodLayout},
    memory::{self, Credentials},
    orphan,
    plugins::{self, Again, SetUp},
    refused::Refused,
    turns::{TurnError, Turns},
    worlds::{SetUpEnd, Worlds},
};
use crate::{
    engine::ports::{Clock, Event, EventSink, MountedVolumes, NodeFacts, ObjectSource, VolumeError, VolumeManager},
    metrics::VolumeMetrics,
    pod::{Pod, PodUid, api},
};

/// Time for all volumes of a pod, up or down.
const VOLUMES_LIMIT: Duration = Duration::from_secs(123);
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
}

/// The volumes of all pods. What is on disk is the state.
pub struct Manager {
    root: PathBuf,
    credentials: Credentials,
    deps: VolumesDeps,
    turns: Turns,
    worlds: Worlds,
    refused: Refused,
}

impl Manager {
    /// A manager of the directories below the root, which need not exist yet.
    pub fn new(config: VolumesConfig, deps: VolumesDeps) -> Self {
        // The mount table knows paths without links only.
        let root = fs::canonicalize(&config.root).unwrap_or(config.root);
        let worlds = Worlds::new(deps.metrics.clone());
        let refused = Refused::new(deps.metrics.orphans());
        Self { root, credentials: config.credentials, deps, turns: Turns::default(), worlds, refused }
    }

    fn layout(&self, pod: &PodUid) -> Result<PodLayout, VolumeError> {
        PodLayout::new(&self.root, pod).map_err(|e| VolumeError::Failed(e.to_string()))
    }

    /// Tells of tokens that lie in volumes which this agent has not set up: those of an agent before it.
    async fn adopt_tokens(&self, pod: &Pod, layout: &PodLayout, volumes: impl Iterator<Item = &api::Volume>) {
        let files = held::files(volumes);
        if files.is_empty() {
            return;
        }
        let layout = layout.clone();
        // What cannot be read in time is asked for.
        let held = self.turns.take(pod.uid(), VOLUMES_LIMIT, move || held::read(&layout, files)).await;
        for (ask, token) in held.unwrap_or_default() {
            self.deps.objects.adopt_token(pod, &ask, &token);
        }
    }
}

#[async_trait]
impl VolumeManager for Manager {
    async fn mount(&self, pod: &Arc<Pod>) -> Result<Arc<MountedVolumes>, VolumeError> {
        let layout = self.layout(pod.uid())?;
        let used = desired::used(pod);
        let names: Vec<String> = used.iter().map(|volume| volume.name.clone()).collect();
        let known = used.iter().filter_map(|volume| Some((volume.name.clone(), plugins::kind(volume)?.plugin)));
        let mounted = self.worlds.desire(pod.uid(), known);
        self.adopt_tokens(pod, &layout, used.iter().copied().filter(|volume| !mounted.contains(&volume.name))).await;
        let allocatable = self.deps.facts.borrow().allocatable.clone();
        let work = Mount {
            memory: (self.credentials == Credentials::InMemory).then(|| memory::size(&allocatable, pod)),
            fetched: fetched::fetch(&*self.deps.objects, pod, &used).await,
            events: self.deps.events.clone(),
            pod: pod.clone(),
            layout,
            allocatable,
            now: self.deps.clock.now(),
            mounted,
        };
        let done = self.turns.take(pod.uid(), VOLUMES_LIMIT, move || work.run()).await;
        match done {
            Ok((mounted, ends)) => {
                self.worlds.set_up(pod.uid(), ends);
                mounted
            }
            Err(e) => Err(waiting(&names, &e.to_string())),
        }
    }

    async fn unmount(&self, pod: &PodUid) -> Result<(), VolumeError> {
        let layout = self.layout(pod)?;
        let began = Instant::now();
        let done = flat(self.turns.take(pod, VOLUMES_LIMIT, move || orphan::tear_down(&layout)).await);
        self.worlds.torn_down(pod, done.is_ok(), began.elapsed());
        done
    }

    async fn pods_on_disk(&self) -> Vec<PodUid> {
        let pods = layout::pods(&self.root);
        let listing = tokio::task::spawn_blocking(move || directories(&pods));
        match tokio::time::timeout(LIST_LIMIT, listing).await {
            Ok(Ok(Ok(found))) => {
                self.refused.swept(&found);
                found
            }
            Ok(Ok(Err(e))) => {
                warn!(err = %e, "Could not list the directories of pods");
                Vec::new()
            }
            Ok(Err(_)) | Err(_) => {
                warn!(limit = ?LIST_LIMIT, "Listing the directories of pods did not return");
                Vec::new()
            }
        }
    }

    async fn remove_directory(&self, pod: &PodUid) -> Result<(), VolumeError> {
        if let Some(error) = self.refused.pausing(pod) {
            return Err(VolumeError::Failed(error));
        }
        let layout = self.layout(pod)?;
        let removed = self.turns.take(pod, VOLUMES_LIMIT, move || orphan::remove_pod(&layout)).await;
        let removed = removed.map_err(|e| e.to_string()).and_then(|done| done.map_err(|e| e.to_string()));
        match removed {
            Ok(had_volumes) => {
                self.refused.removed(pod, had_volumes);
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

fn flat(done: Result<Result<(), orphan::LeftOver>, TurnError>) -> Result<(), VolumeError> {
    match done {
        Ok(done) => done.map_err(|e| VolumeError::Failed(e.to_string())),
        Err(e) => Err(VolumeError::Failed(e.to_string())),
    }
}

/// All volumes of one pod; runs on the blocking pool.
struct Mount {
    memory: Option<u64>,
    fetched: Fetched,
    events: Arc<dyn EventSink>,
    pod: Arc<Pod>,
    layout: PodLayout,
    allocatable: BTreeMap<String, String>,
    now: Timestamp,
    /// Volumes that were set up before.
    mounted: BTreeSet<String>,
}

impl Mount {
    /// The volumes, and what was done for them.
    fn run(&self) -> (Result<Arc<MountedVolumes>, VolumeError>, Vec<SetUpEnd>) {
        let mut ends = Vec::new();
        (self.all(&mut ends), ends)
    }

    fn all(&self, ends: &mut Vec<SetUpEnd>) -> Result<Arc<MountedVolumes>, VolumeError> {
        for dir in [self.layout.pod().to_owned(), self.layout.volumes(), self.layout.plugins()] {
            DirBuilder::new()
                .recursive(true)
                .mode(0o750)
                .create(&dir)
                .map_err(|e| VolumeError::Failed(format!("error making pod data directories: {e}")))?;
        }
        let (mut mounted, mut missing, mut errors) = (MountedVolumes::default(), Vec::new(), Vec::new());
        for volume in desired::used(&self.pod) {
            let request = SetUp {
                pod: &self.pod,
                volume,
                layout: &self.layout,
                allocatable: &self.allocatable,
                fetched: &self.fetched,
                memory: self.memory,
                now: self.now,
            };
            let began = Instant::now();
            let done = plugins::set_up(&request);
            ends.extend(self.end(volume, done.is_ok(), began.elapsed()));
            match done {
                Ok(one) => {
                    mounted.by_name.insert(volume.name.clone(), one);
                }
                // Its containers go on with what it shows, and so do those that start again.
                Err(VolumeError::Failed(text)) if let Some(one) = plugins::as_it_was(&request) => {
                    self.events.record(Event::warning(self.pod.id(), "FailedMount", text));
                    mounted.by_name.insert(volume.name.clone(), one);
                }
                Err(e @ VolumeError::Unsupported { .. }) => return Err(e),
                Err(e) => {
                    missing.push(volume.name.clone());
                    errors.push(e.to_string());
                }
            }
        }
        if errors.is_empty() { Ok(Arc::new(mounted)) } else { Err(waiting(&missing, &errors.join("; "))) }
    }

    /// What is to be told of a volume; nothing of one that was only looked at again.
    fn end(&self, volume: &api::Volume, succeeded: bool, elapsed: Duration) -> Option<SetUpEnd> {
        let kind = plugins::kind(volume)?;
        let is_told = !succeeded || kind.again == Again::EveryTurn || !self.mounted.contains(&volume.name);
        is_told.then(|| SetUpEnd { volume: volume.name.clone(), plugin: kind.plugin, succeeded, elapsed })
    }
}

/// The text of the reference for volumes that a pod waits for.
fn waiting(names: &[String], cause: &str) -> VolumeError {
    let mut names = names.to_vec();
    names.sort();
    VolumeError::Failed(format!(
        "unmounted volumes=[{}], unattached volumes=[], failed to process volumes=[]: {cause}",
        names.join(" ")
    ))
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
