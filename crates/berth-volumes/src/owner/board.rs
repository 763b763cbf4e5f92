//! All volumes that have an owner, by name: what pods want of them goes in, what is there comes out.

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

use super::{state::Presence, task::Owner};
use crate::{
    device::{DevicePlugin, Published, Rebuilt, Traits, Usage},
    hands::{Hands, LOOKS},
    operation::OperationDeps,
    spec::{Mode, UniqueName},
};
use berth_metrics::VolumeMetrics;
use berth_ports::{Attached, EventSink, NodeFacts, StorageObjects};
use berth_types::PodUid;

/// What owners need of others.
pub struct BoardDeps {
    /// The root directory.
    pub root: PathBuf,
    /// The node's labels and name.
    pub facts: watch::Receiver<Arc<NodeFacts>>,
    /// The API server.
    pub storage: Arc<dyn StorageObjects>,
    /// Which volumes the API server knows to be in use here.
    pub reported: watch::Receiver<Arc<BTreeSet<String>>>,
    /// Where failures are told.
    pub events: Arc<dyn EventSink>,
    /// What is counted.
    pub metrics: VolumeMetrics,
    /// Where tasks are counted.
    pub tasks: TaskTracker,
    /// Ends them.
    pub stop: CancellationToken,
    /// Threads that may block.
    pub hands: Hands,
}

/// What a pod wants of a volume.
#[derive(Clone, Debug)]
pub struct Desire {
    /// All that staging and publishing need.
    pub usage: Usage,
    /// What the volume is like.
    pub traits: Traits,
    /// Moves with every turn of the pod.
    pub turn: u64,
    /// Bytes from and to, where the claim says that it has grown.
    pub growth: Option<(u64, u64)>,
    /// Since when the pod has wanted it.
    pub since: Instant,
    /// The label of SELinux that all pods have to agree on.
    pub asked_label: Option<String>,
}

/// By pod; `None` for one that wants it no more.
pub(super) type Desires = BTreeMap<PodUid, Option<Arc<Desire>>>;

/// What a pod has of a volume.
#[derive(Clone, Debug)]
pub struct ShownPod {
    /// Whether it is there.
    pub presence: Presence,
    /// What was published.
    pub published: Option<Published>,
    /// The mode of the volume's root.
    pub root_mode: u32,
    /// Others have it with another label of SELinux.
    pub is_hindered: bool,
    /// Why the last attempt to mount it failed.
    pub failure: Option<Arc<str>>,
}

/// A volume, as others see it.
#[derive(Clone, Debug, Default)]
pub struct Shown {
    /// Somebody attaches it first.
    pub attachable: bool,
    /// It is attached.
    pub is_attached: bool,
    /// Its pods.
    pub pods: BTreeMap<PodUid, ShownPod>,
}

/// The two sides of an owner.
pub(super) struct Slot {
    pub(super) desires: watch::Sender<Desires>,
    pub(super) shown: watch::Sender<Arc<Shown>>,
    pub(super) plugin: Arc<dyn DevicePlugin>,
    /// Who asks how full it is.
    pub(super) measuring: Arc<Semaphore>,
}

/// What an earlier agent left of one volume in one pod.
pub struct Leftover {
    /// Whose it is.
    pub plugin: Arc<dyn DevicePlugin>,
    /// The pod.
    pub pod: PodUid,
    /// The volume's place in it.
    pub path: PathBuf,
    /// As what.
    pub mode: Mode,
    /// What it is.
    pub rebuilt: Rebuilt,
}

/// What an earlier agent staged.
pub struct Staged {
    /// Whose it is.
    pub plugin: Arc<dyn DevicePlugin>,
    /// As what.
    pub mode: Mode,
    /// What it is.
    pub rebuilt: Rebuilt,
}

/// The volumes.
pub struct Board {
    pub(super) deps: BoardDeps,
    slots: Mutex<BTreeMap<UniqueName, Arc<Slot>>>,
    in_use: watch::Sender<Option<Vec<String>>>,
    /// Threads for mere looks at how full volumes are.
    pub(super) lookers: Hands,
    /// Whether what was left was looked for.
    is_synced: watch::Sender<bool>,
}

impl Board {
    /// No volumes yet.
    pub fn new(deps: BoardDeps, in_use: watch::Sender<Option<Vec<String>>>) -> Arc<Self> {
        let (lookers, is_synced) = (Hands::new(LOOKS), watch::Sender::new(false));
        Arc::new(Self { deps, slots: Mutex::default(), in_use, lookers, is_synced })
    }

    pub(super) fn slots(&self) -> MutexGuard<'_, BTreeMap<UniqueName, Arc<Slot>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was left is known: from now on it is told which volumes are in use, once the node was read where
    /// something was left.
    pub fn synced(self: &Arc<Self>) {
        let has_left = !self.slots().is_empty();
        let (board, mut attached) = (self.clone(), self.deps.storage.attached());
        let wait = async move {
            if has_left && attached.wait_for(Option::is_some).await.is_err() {
                std::future::pending::<()>().await;
            }
            board.is_synced.send_replace(true);
            board.tell_in_use();
        };
        let stop = self.deps.stop.clone();
        self.deps.tasks.spawn(async move {
            stop.run_until_cancelled(wait).await;
        });
    }

    /// A pod wants the volume.
    pub fn want(self: &Arc<Self>, plugin: &Arc<dyn DevicePlugin>, desire: Desire) -> watch::Receiver<Arc<Shown>> {
        let pod = desire.usage.pod.uid().clone();
        let mut slots = self.slots();
        let unique = desire.usage.unique.clone();
        let slot = slots.entry(unique.clone()).or_insert_with(|| {
            let (traits, hands) = (desire.traits.clone(), self.deps.hands.clone());
            let owner = Owner::new(unique, plugin.clone(), traits, desire.usage.mode, hands);
            self.start(owner)
        });
        slot.desires.send_modify(|all| {
            all.insert(pod, Some(Arc::new(desire)));
        });
        let shown = slot.shown.subscribe();
        drop(slots);
        self.tell_in_use();
        shown
    }

    /// Whether the pod wants that volume, or may have it.
    pub fn has_volume(&self, pod: &PodUid, name: &UniqueName) -> bool {
        self.slots().get(name).is_some_and(|slot| {
            let is_wanted = slot.desires.borrow().get(pod).is_some_and(Option::is_some);
            is_wanted || slot.shown.borrow().pods.get(pod).is_some_and(|own| own.presence != Presence::Absent)
        })
    }

    /// The label of SELinux that another pod wants that volume with; `None` where no other wants it.
    pub fn label_of_others(&self, pod: &PodUid, name: &UniqueName) -> Option<Option<String>> {
        let slots = self.slots();
        let desires = slots.get(name)?.desires.borrow();
        let mut others = desires.iter().filter(|(other, _)| *other != pod).filter_map(|(_, desire)| desire.as_ref());
        others.next().map(|desire| desire.asked_label.clone())
    }

    /// Whether something of the pod is there, or wanted.
    pub fn has(&self, pod: &PodUid) -> bool {
        let slots = self.slots();
        let is_known =
            |slot: &Arc<Slot>| slot.desires.borrow().contains_key(pod) || slot.shown.borrow().pods.contains_key(pod);
        slots.values().any(is_known)
    }

    /// The pod wants none of its volumes any more; where each is shown.
    pub fn unwant(&self, pod: &PodUid) -> Vec<(UniqueName, watch::Receiver<Arc<Shown>>)> {
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

    /// The volume as it is shown.
    pub fn shown(&self, name: &UniqueName) -> Option<Arc<Shown>> {
        self.slots().get(name).map(|slot| slot.shown.borrow().clone())
    }

    /// What an earlier agent left: all pods of one volume have one owner. Where that is not all, nothing is unstaged.
    pub fn adopt(self: &Arc<Self>, left: Vec<Leftover>, staged: Vec<Staged>, is_all: bool) {
        let hands = &self.deps.hands;
        let mut owners: BTreeMap<UniqueName, Owner> = BTreeMap::new();
        for one in left {
            let traits = &one.rebuilt.traits;
            let unique = traits.unique(one.plugin.name(), &one.pod, &one.rebuilt.spec);
            let owner = owners
                .entry(unique.clone())
                .or_insert_with(|| Owner::new(unique, one.plugin.clone(), traits.clone(), one.mode, hands.clone()));
            owner.adopt(one);
        }
        for one in staged {
            let unique = UniqueName::shared(one.plugin.name(), &one.rebuilt.traits.volume);
            // What a pod has of it says the same.
            owners.entry(unique.clone()).or_insert_with(|| {
                let mut owner =
                    Owner::new(unique, one.plugin.clone(), one.rebuilt.traits.clone(), one.mode, hands.clone());
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

    /// What an operation needs of others.
    pub(super) fn operation(&self, unwanted: CancellationToken) -> OperationDeps {
        OperationDeps {
            hands: self.deps.hands.clone(),
            events: Some(self.deps.events.clone()),
            metrics: Some(self.deps.metrics.clone()),
            tasks: self.deps.tasks.clone(),
            unwanted,
            stop: self.deps.stop.clone(),
        }
    }

    /// The same for a mere look: many that hang hold up no operation.
    pub(super) fn looking(&self) -> OperationDeps {
        OperationDeps { hands: self.lookers.clone(), ..self.operation(self.deps.stop.child_token()) }
    }

    fn start(self: &Arc<Self>, owner: Owner) -> Arc<Slot> {
        let slot = Arc::new(Slot {
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

    /// The owner of a volume that is gone goes, unless somebody came to want it.
    pub(super) fn retire(&self, name: &UniqueName, desires: &watch::Receiver<Desires>) -> bool {
        let mut slots = self.slots();
        // Whoever wants it holds the slots while saying so.
        if desires.has_changed().unwrap_or(false) {
            return false;
        }
        slots.remove(name);
        drop(slots);
        self.tell_in_use();
        true
    }

    fn tell_in_use(&self) {
        if !*self.is_synced.borrow() {
            return;
        }
        let slots = self.slots();
        let names: Vec<String> = slots
            .iter()
            .filter(|(_, slot)| slot.shown.borrow().attachable)
            .map(|(name, _)| name.as_str().to_owned())
            .collect();
        // Sent while nobody else can come to know better.
        self.in_use.send_if_modified(|known| {
            let is_news = known.as_ref() != Some(&names);
            *known = Some(names);
            is_news
        });
        drop(slots);
    }

    /// What the node's status says is attached.
    pub(super) fn attached(&self) -> watch::Receiver<Attached> {
        self.deps.storage.attached()
    }
}
