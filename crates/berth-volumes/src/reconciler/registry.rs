//! Registry of all volumes with an owner task: desired state of pods in, observed volume state out.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::{
    sync::{Semaphore, watch},
    time::Instant,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{state::MountPresence, task::VolumeReconciler};
use crate::{
    attachable::{AttachableVolumePlugin, PublishedVolume, ReconstructedVolume, Usage, VolumeTraits},
    blocking_pools,
    operation::OperationDeps,
    spec::{Mode, UniqueName},
};
use berth_metrics::VolumeMetrics;
use berth_ports::{AttachedVolumes, EventSink, NodeFacts, StorageObjects};
use berth_sys::blocking_pool::BlockingPool;
use berth_types::PodUid;

/// Dependencies of owner tasks.
pub struct ReconcilerDeps {
    /// Root directory of the agent.
    pub root: PathBuf,
    /// Name and labels of the node.
    pub facts: watch::Receiver<Arc<NodeFacts>>,
    /// API server access for storage objects.
    pub storage: Arc<dyn StorageObjects>,
    /// Volumes that the API server lists in `node.status.volumesInUse`.
    pub reported: watch::Receiver<Arc<BTreeSet<String>>>,
    /// Sink for events about failures.
    pub events: Arc<dyn EventSink>,
    /// Volume metrics.
    pub metrics: VolumeMetrics,
    /// Tracker of spawned tasks.
    pub tasks: TaskTracker,
    /// Stops all owner tasks.
    pub stop: CancellationToken,
    /// Thread pool for blocking volume operations.
    pub pool: BlockingPool,
}

/// Desired state of a volume in one pod.
#[derive(Clone, Debug)]
pub struct DesiredVolume {
    /// All inputs of staging and publishing.
    pub usage: Usage,
    /// Properties of the volume.
    pub traits: VolumeTraits,
    /// Sequence number of the pod's sync; increases with every sync.
    pub turn: u64,
    /// Current and requested size in bytes; `None` if no expansion is due.
    pub growth: Option<(u64, u64)>,
    /// When the pod first needed the volume.
    pub since: Instant,
    /// SELinux label that all pods of the volume must agree on.
    pub asked_label: Option<String>,
}

/// Desired state by pod; `None` for a pod that no longer needs the volume.
pub(super) type Desires = BTreeMap<PodUid, Option<Arc<DesiredVolume>>>;

/// Observed state of a volume in one pod.
#[derive(Clone, Debug)]
pub struct ObservedPodVolume {
    /// Whether the volume is published to the pod.
    pub presence: MountPresence,
    /// Published path, if any.
    pub published: Option<PublishedVolume>,
    /// Mode bits of the volume's root.
    pub root_mode: u32,
    /// Other pods have the volume with a different SELinux label.
    pub is_label_blocked: bool,
    /// Error of the last mount attempt, if it failed.
    pub failure: Option<Arc<str>>,
}

/// Observed state of a volume.
#[derive(Clone, Debug, Default)]
pub struct ObservedVolume {
    /// The volume must be attached before use.
    pub attachable: bool,
    /// The volume is attached, or needs no attachment.
    pub is_attached: bool,
    /// Observed state per pod.
    pub pods: BTreeMap<PodUid, ObservedPodVolume>,
}

/// Channels between the board and an owner task.
pub(super) struct VolumeChannels {
    pub(super) desires: watch::Sender<Desires>,
    pub(super) shown: watch::Sender<Arc<ObservedVolume>>,
    pub(super) plugin: Arc<dyn AttachableVolumePlugin>,
    /// Permit of the one usage measurement at a time.
    pub(super) measuring: Arc<Semaphore>,
}

/// Volume that an earlier agent left in one pod.
pub struct ReconstructedPodVolume {
    /// Plugin of the volume.
    pub plugin: Arc<dyn AttachableVolumePlugin>,
    /// UID of the pod.
    pub pod: PodUid,
    /// Target path of the volume in the pod.
    pub path: PathBuf,
    /// Volume mode.
    pub mode: Mode,
    /// Reconstructed volume.
    pub rebuilt: ReconstructedVolume,
}

/// Volume that an earlier agent staged.
pub struct ReconstructedStage {
    /// Plugin of the volume.
    pub plugin: Arc<dyn AttachableVolumePlugin>,
    /// Volume mode.
    pub mode: Mode,
    /// Reconstructed volume.
    pub rebuilt: ReconstructedVolume,
}

/// All volumes with an owner task, by unique name.
pub struct ReconcilerRegistry {
    pub(super) deps: ReconcilerDeps,
    slots: Mutex<BTreeMap<UniqueName, Arc<VolumeChannels>>>,
    in_use: watch::Sender<Option<Vec<String>>>,
    /// Thread pool for usage measurements.
    pub(super) usage_pool: BlockingPool,
    /// Whether the volumes in use are published: reconstruction from disk is complete.
    is_synced: watch::Sender<bool>,
}

impl ReconcilerRegistry {
    /// Creates a board without volumes.
    pub fn new(deps: ReconcilerDeps, in_use: watch::Sender<Option<Vec<String>>>) -> Arc<Self> {
        let (usage_pool, is_synced) = (blocking_pools::usage(), watch::Sender::new(false));
        Arc::new(Self { deps, slots: Mutex::default(), in_use, usage_pool, is_synced })
    }

    pub(super) fn slots(&self) -> MutexGuard<'_, BTreeMap<UniqueName, Arc<VolumeChannels>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks reconstruction from disk as complete. From now on the list of volumes in use is published; where anything
    /// was reconstructed, only once the node status has been read.
    pub fn synced(self: &Arc<Self>) {
        let has_left = !self.slots().is_empty();
        let (board, mut attached) = (self.clone(), self.deps.storage.attached());
        let wait = async move {
            if has_left && attached.wait_for(Option::is_some).await.is_err() {
                std::future::pending::<()>().await;
            }
            board.is_synced.send_replace(true);
            board.publish_in_use();
        };
        let stop = self.deps.stop.clone();
        self.deps.tasks.spawn(async move {
            stop.run_until_cancelled(wait).await;
        });
    }

    /// Records that a pod needs the volume; starts its owner task if there is none.
    pub fn add_desired(
        self: &Arc<Self>,
        plugin: &Arc<dyn AttachableVolumePlugin>,
        desire: DesiredVolume,
    ) -> watch::Receiver<Arc<ObservedVolume>> {
        let pod = desire.usage.pod.uid().clone();
        let mut slots = self.slots();
        let unique = desire.usage.unique.clone();
        let slot = slots.entry(unique.clone()).or_insert_with(|| {
            let (traits, pool) = (desire.traits.clone(), self.deps.pool.clone());
            let owner = VolumeReconciler::new(unique, plugin.clone(), traits, desire.usage.mode, pool);
            self.start(owner)
        });
        slot.desires.send_modify(|all| {
            all.insert(pod, Some(Arc::new(desire)));
        });
        let shown = slot.shown.subscribe();
        drop(slots);
        self.publish_in_use();
        shown
    }

    /// Whether the pod needs that volume, or may have it.
    pub fn has_volume(&self, pod: &PodUid, name: &UniqueName) -> bool {
        self.slots().get(name).is_some_and(|slot| {
            let is_wanted = slot.desires.borrow().get(pod).is_some_and(Option::is_some);
            is_wanted || slot.shown.borrow().pods.get(pod).is_some_and(|own| own.presence != MountPresence::Absent)
        })
    }

    /// Returns the SELinux label with which another pod needs that volume; `None` if no other pod needs it.
    pub fn label_of_others(&self, pod: &PodUid, name: &UniqueName) -> Option<Option<String>> {
        let slots = self.slots();
        let desires = slots.get(name)?.desires.borrow();
        let mut others = desires.iter().filter(|(other, _)| *other != pod).filter_map(|(_, desire)| desire.as_ref());
        others.next().map(|desire| desire.asked_label.clone())
    }

    /// Whether the pod needs, or may have, any volume.
    pub fn has(&self, pod: &PodUid) -> bool {
        let slots = self.slots();
        let is_known = |slot: &Arc<VolumeChannels>| {
            slot.desires.borrow().contains_key(pod) || slot.shown.borrow().pods.contains_key(pod)
        };
        slots.values().any(is_known)
    }

    /// Records that the pod needs none of its volumes any more; returns the observed state of each of them.
    pub fn remove_desired(&self, pod: &PodUid) -> Vec<(UniqueName, watch::Receiver<Arc<ObservedVolume>>)> {
        let slots = self.slots();
        let mut found = Vec::new();
        for (name, slot) in slots.iter() {
            let is_known = slot.desires.borrow().contains_key(pod) || slot.shown.borrow().pods.contains_key(pod);
            if is_known {
                slot.desires.send_modify(|all| {
                    all.insert(pod.clone(), None);
                });
                found.push((name.clone(), slot.shown.subscribe()));
            }
        }
        found
    }

    /// Returns the observed state of the volume.
    pub fn shown(&self, name: &UniqueName) -> Option<Arc<ObservedVolume>> {
        self.slots().get(name).map(|slot| slot.shown.borrow().clone())
    }

    /// Starts owner tasks for what an earlier agent left; all pods of one volume share one owner. If the reconstruction
    /// is incomplete (`is_all` is false), nothing is unstaged.
    pub fn adopt(self: &Arc<Self>, left: Vec<ReconstructedPodVolume>, staged: Vec<ReconstructedStage>, is_all: bool) {
        let pool = &self.deps.pool;
        let mut owners: BTreeMap<UniqueName, VolumeReconciler> = BTreeMap::new();
        for one in left {
            let traits = &one.rebuilt.traits;
            let unique = traits.unique(one.plugin.name(), &one.pod, &one.rebuilt.spec);
            let owner = owners.entry(unique.clone()).or_insert_with(|| {
                VolumeReconciler::new(unique, one.plugin.clone(), traits.clone(), one.mode, pool.clone())
            });
            owner.adopt(one);
        }
        for one in staged {
            let unique = UniqueName::shared(one.plugin.name(), &one.rebuilt.traits.volume);
            // A reconstruction from a pod already includes the stage.
            owners.entry(unique.clone()).or_insert_with(|| {
                let mut owner = VolumeReconciler::new(
                    unique,
                    one.plugin.clone(),
                    one.rebuilt.traits.clone(),
                    one.mode,
                    pool.clone(),
                );
                owner.adopt_stage(one.rebuilt);
                owner
            });
        }
        for (unique, mut owner) in owners {
            if !is_all {
                owner.keep_stage();
            }
            let mut slots = self.slots();
            let slot = self.start(owner);
            slots.insert(unique, slot);
        }
    }

    /// Returns the dependencies of an operation.
    pub(super) fn operation(&self, unwanted: CancellationToken) -> OperationDeps {
        OperationDeps {
            pool: self.deps.pool.clone(),
            events: Some(self.deps.events.clone()),
            metrics: Some(self.deps.metrics.clone()),
            tasks: self.deps.tasks.clone(),
            canceled: unwanted,
            stop: self.deps.stop.clone(),
        }
    }

    /// Returns the dependencies of a usage measurement, with its own thread pool: hanging measurements delay no
    /// operation.
    pub(super) fn measurement_deps(&self) -> OperationDeps {
        OperationDeps { pool: self.usage_pool.clone(), ..self.operation(self.deps.stop.child_token()) }
    }

    fn start(self: &Arc<Self>, owner: VolumeReconciler) -> Arc<VolumeChannels> {
        let slot = Arc::new(VolumeChannels {
            desires: watch::Sender::default(),
            shown: watch::Sender::new(Arc::new(owner.shown())),
            plugin: owner.plugin.clone(),
            measuring: Arc::new(Semaphore::new(1)),
        });
        let stop = self.deps.stop.clone();
        let run = owner.run(self.clone(), slot.clone());
        self.deps.tasks.spawn(async move {
            stop.run_until_cancelled(run).await;
        });
        slot
    }

    /// Removes the owner of a fully removed volume, unless a pod needs the volume again; returns whether it was
    /// removed.
    pub(super) fn retire(&self, name: &UniqueName, desires: &watch::Receiver<Desires>) -> bool {
        let mut slots = self.slots();
        // `want` sends the desired state under the same lock, so that no change is missed here.
        if desires.has_changed().unwrap_or(false) {
            return false;
        }
        slots.remove(name);
        drop(slots);
        self.publish_in_use();
        true
    }

    fn publish_in_use(&self) {
        if !*self.is_synced.borrow() {
            return;
        }
        let slots = self.slots();
        let names: Vec<String> = slots
            .iter()
            .filter(|(_, slot)| slot.shown.borrow().attachable)
            .map(|(name, _)| name.as_str().to_owned())
            .collect();
        // Sent under the lock, so that an older list never replaces a newer one.
        self.in_use.send_if_modified(|known| {
            let is_news = known.as_ref() != Some(&names);
            *known = Some(names);
            is_news
        });
        drop(slots);
    }

    /// Returns the attached volumes of the node status.
    pub(super) fn attached(&self) -> watch::Receiver<AttachedVolumes> {
        self.deps.storage.attached()
    }
}
