//! Set-up of a pod's file-based volumes; those with stored objects do not wait for issued tokens.
//!
//! Implements spec 07 §5.1, §9.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::DirBuilder,
    os::unix::fs::DirBuilderExt,
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use tokio::time::Instant;

use super::{PodVolumeManager, VOLUMES_LIMIT};
use crate::{
    api_objects::{self, VolumeObjects},
    layout::PodLayout,
    memory::{self, CredentialStorage},
    mount_wait::MountWaitError,
    plugins::{self, SetUp, SetUpFrequency, VerifiedCache},
    spec::VolumeSpec,
    state_of_world::SetUpResult,
    token_reuse,
};
use berth_ports::{EventRecord, EventSink, MountedVolumes, VolumeError};
use berth_types::{Pod, api};

/// Volume, and its resolved spec if it is behind a claim.
pub(super) type Local = (api::Volume, Option<Arc<VolumeSpec>>);

/// Result of setting up volumes.
#[derive(Default)]
struct SetUpOutcome {
    mounted: MountedVolumes,
    missing: Vec<String>,
    errors: Vec<String>,
    /// Error that fails all volumes of the pod.
    fatal: Option<VolumeError>,
}

impl SetUpOutcome {
    /// Returns the result where all of these volumes failed with the same cause.
    fn none(names: Vec<String>, cause: String) -> Self {
        Self { missing: names, errors: vec![cause], ..Self::default() }
    }

    fn with(mut self, other: Self) -> Self {
        self.mounted.by_name.extend(other.mounted.by_name);
        self.missing.extend(other.missing);
        self.errors.extend(other.errors);
        self.fatal = self.fatal.or(other.fatal);
        self
    }

    fn all(self) -> Result<Arc<MountedVolumes>, VolumeError> {
        match (self.fatal, self.errors.is_empty()) {
            (Some(error), _) => Err(error),
            (None, true) => Ok(Arc::new(self.mounted)),
            (None, false) => {
                let mut causes = self.errors;
                causes.dedup();
                Err(MountWaitError::for_files(self.missing, causes))
            }
        }
    }
}

impl PodVolumeManager {
    /// Passes tokens from volumes of an earlier agent to the token cache.
    async fn adopt_tokens(&self, pod: &Pod, layout: &PodLayout, volumes: impl Iterator<Item = &api::Volume>) {
        let files = token_reuse::files(volumes);
        if files.is_empty() {
            return;
        }
        let layout = layout.clone();
        // A token that cannot be read in time is requested instead.
        let tokens = self.turns.take(pod.uid(), VOLUMES_LIMIT, move || token_reuse::read(&layout, files)).await;
        for (ask, token) in tokens.unwrap_or_default() {
            self.deps.objects.adopt_token(pod, &ask, &token);
        }
    }

    /// Sets up the pod's file-based volumes.
    pub(super) async fn set_up(
        &self,
        pod: &Arc<Pod>,
        layout: PodLayout,
        local: Vec<Local>,
    ) -> Result<Arc<MountedVolumes>, VolumeError> {
        let known = local.iter().filter_map(|(volume, _)| Some((volume.name.clone(), plugins::kind(volume)?.plugin)));
        let mounted = self.worlds.desire(pod.uid(), known);
        let left = self.worlds.unverified(pod.uid());
        let volumes = local.iter().map(|(volume, _)| volume);
        self.adopt_tokens(pod, &layout, volumes.filter(|volume| left.contains(&volume.name))).await;
        let is_new = local.iter().any(|(volume, _)| !mounted.contains(&volume.name));
        // Refreshes of existing volumes run as one batch: they recur every minute, and no container waits for them.
        let (issued, stored): (Vec<_>, Vec<_>) =
            local.into_iter().partition(|(volume, _)| is_new && api_objects::is_issued(volume));
        let some = async |volumes: Vec<Local>| self.set_up_some(pod, &layout, &mounted, volumes).await;
        if issued.is_empty() {
            return some(stored).await.all();
        }
        if stored.is_empty() {
            return some(issued).await.all();
        }
        let (stored, issued) = tokio::join!(some(stored), some(issued));
        stored.with(issued).all()
    }

    async fn set_up_some(
        &self,
        pod: &Arc<Pod>,
        layout: &PodLayout,
        mounted: &BTreeSet<String>,
        volumes: Vec<Local>,
    ) -> SetUpOutcome {
        let names: Vec<String> = volumes.iter().map(|(volume, _)| volume.name.clone()).collect();
        let wanted: Vec<&api::Volume> = volumes.iter().map(|(volume, _)| volume).collect();
        let fetched = api_objects::fetch(&*self.deps.objects, pod, &wanted).await;
        let allocatable = self.deps.facts.borrow().allocatable.clone();
        let work = Mount {
            memory: (self.credentials == CredentialStorage::InMemory).then(|| memory::size(&allocatable, pod)),
            fetched,
            events: self.deps.events.clone(),
            verified: self.verified.clone(),
            pod: pod.clone(),
            layout: layout.clone(),
            allocatable,
            now: self.deps.clock.now(),
            mounted: mounted.clone(),
            volumes,
        };
        match self.turns.take(pod.uid(), VOLUMES_LIMIT, move || work.run()).await {
            Ok((made, ends)) => {
                self.worlds.set_up(pod.uid(), ends);
                made
            }
            Err(e) => SetUpOutcome::none(names, e.to_string()),
        }
    }
}

/// Batch of volumes of one pod; runs on the blocking pool.
struct Mount {
    memory: Option<u64>,
    fetched: VolumeObjects,
    events: Arc<dyn EventSink>,
    verified: Arc<VerifiedCache>,
    pod: Arc<Pod>,
    layout: PodLayout,
    allocatable: BTreeMap<String, String>,
    now: Timestamp,
    /// Volumes that were set up before.
    mounted: BTreeSet<String>,
    /// Volumes to set up.
    volumes: Vec<Local>,
}

impl Mount {
    /// Sets up the volumes; returns them with the results for the metrics.
    fn run(&self) -> (SetUpOutcome, Vec<SetUpResult>) {
        let (mut made, mut ends) = (SetUpOutcome::default(), Vec::new());
        for dir in [self.layout.pod().to_owned(), self.layout.volumes(), self.layout.plugins()] {
            if let Err(e) = DirBuilder::new().recursive(true).mode(0o750).create(&dir) {
                made.fatal = Some(VolumeError::Failed(format!("error making pod data directories: {e}")));
                return (made, ends);
            }
        }
        for (volume, claimed) in &self.volumes {
            let request = SetUp {
                pod: &self.pod,
                volume,
                layout: &self.layout,
                allocatable: &self.allocatable,
                fetched: &self.fetched,
                memory: self.memory,
                verified: &self.verified,
                now: self.now,
            };
            let began = Instant::now();
            let done = plugins::set_up(&request);
            ends.extend(self.end(volume, done.is_ok(), began.elapsed()));
            match done {
                Ok(mut one) => {
                    one.read_only |= claimed.as_ref().is_some_and(|spec| spec.read_only());
                    made.mounted.by_name.insert(volume.name.clone(), one);
                }
                // Running and restarted containers keep the last content of the volume.
                Err(VolumeError::Failed(text)) if let Some(one) = plugins::last_published(&request) => {
                    self.events.record(EventRecord::warning(self.pod.id(), "FailedMount", text));
                    made.mounted.by_name.insert(volume.name.clone(), one);
                }
                Err(e @ VolumeError::Unsupported { .. }) => {
                    made.fatal = Some(e);
                    return (made, ends);
                }
                Err(e) => {
                    made.missing.push(volume.name.clone());
                    made.errors.push(e.to_string());
                }
            }
        }
        (made, ends)
    }

    /// Returns the result to count; `None` for a volume that was only verified.
    fn end(&self, volume: &api::Volume, succeeded: bool, elapsed: Duration) -> Option<SetUpResult> {
        let kind = plugins::kind(volume)?;
        let is_counted = !succeeded || kind.again == SetUpFrequency::EveryTurn || !self.mounted.contains(&volume.name);
        is_counted.then(|| SetUpResult { volume: volume.name.clone(), plugin: kind.plugin, succeeded, elapsed })
    }
}
