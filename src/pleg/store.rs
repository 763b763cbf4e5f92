//! Pod store: one slot with an observation channel per pod.
//!
//! Written by this module alone: [`super::owner`] publishes, [`super::Pleg`] opens views and sets
//! marks. The mutex guards map operations only and is never held across an await.
//!
//! Generations come from one counter for all pods, so they stay ordered when a slot is dropped and
//! recreated, and a query needs no coordination with actions: it reads the counter when it begins, an
//! action increments it when it has ended.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use jiff::Timestamp;
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

use berth_ports::{LatestObservation, PodView, RuntimePods};
use berth_types::{
    PodRef, PodUid,
    observation::{Generation, ObservedPod},
};

/// Why a pod is to be queried.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Mark {
    /// No query is needed.
    Clean,
    /// Something may have changed.
    Changed,
    /// An action has ended: resources may have changed too.
    Acted,
}

/// Parameters at the start of a query.
pub(super) struct QueryStart {
    pub pod: PodRef,
    pub mark: Mark,
    pub generation: Generation,
}

struct PodSlot {
    pod: PodRef,
    sender: watch::Sender<Option<LatestObservation>>,
    /// State from the last list, until a query has confirmed it.
    listed: Option<Arc<ObservedPod>>,
    mark: Mark,
    query_started_at: Option<Instant>,
    /// Generation at the end of the last action on the pod.
    acted: Generation,
}

#[derive(Default)]
struct Index {
    slots: HashMap<PodUid, PodSlot>,
    /// Start of the last complete list.
    listed: Option<(Generation, Timestamp)>,
}

/// Slots and generation counter; see the module documentation.
pub(super) struct ObservationStore {
    index: Mutex<Index>,
    generation: AtomicU64,
    /// Marked pods, each at most once until its query begins.
    marked: mpsc::UnboundedSender<PodUid>,
}

impl ObservationStore {
    pub fn new() -> (Arc<Self>, mpsc::UnboundedReceiver<PodUid>) {
        let (marked, receiver) = mpsc::unbounded_channel();
        (Arc::new(Self { index: Mutex::default(), generation: AtomicU64::new(0), marked }), receiver)
    }

    /// The current generation.
    pub fn now(&self) -> Generation {
        Generation(self.generation.load(Ordering::SeqCst))
    }

    /// Opens a view of a pod. A pod that is known not to be in the runtime is observed as empty at
    /// once.
    pub fn view(&self, pod: &PodRef) -> PodView {
        let mut index = self.lock();
        let listed = index.listed;
        let slot = index.slots.entry(pod.uid.clone()).or_insert_with(|| {
            let empty = listed.map(|(generation, at)| nothing(pod.clone(), generation, at));
            PodSlot::new(pod.clone(), empty)
        });
        if slot.pod.name.is_empty() {
            slot.pod = pod.clone();
        }
        let mut receiver = slot.sender.subscribe();
        receiver.mark_changed();
        PodView::new(receiver, slot.acted)
    }

    /// Records the end of an action: increments the generation and marks the pod.
    pub fn acted(&self, pod: &PodUid) -> Generation {
        let generation = Generation(self.generation.fetch_add(1, Ordering::SeqCst) + 1);
        self.mark(pod, Mark::Acted);
        if let Some(slot) = self.lock().slots.get_mut(pod) {
            slot.acted = slot.acted.max(generation);
        }
        generation
    }

    /// Marks a pod for a query, unless it is already marked.
    pub fn mark(&self, pod: &PodUid, mark: Mark) {
        let mut index = self.lock();
        let slot = index.slots.entry(pod.clone()).or_insert_with(|| {
            let unnamed = PodRef { uid: pod.clone(), name: "".into(), namespace: "".into() };
            PodSlot::new(unnamed, None)
        });
        let was = slot.mark;
        slot.mark = was.max(mark);
        if was == Mark::Clean {
            // The owner is gone only at shutdown, when no queries are needed.
            let _ = self.marked.send(pod.clone());
        }
    }

    /// Whether a pod is marked.
    pub fn is_marked(&self, pod: &PodUid) -> bool {
        self.lock().slots.get(pod).is_some_and(|s| s.mark != Mark::Clean)
    }

    /// Begins a query: clears the mark, then reads the generation, in this order: an action that ends
    /// later finds no mark and sets a new one.
    pub fn begin(&self, pod: &PodUid) -> Option<QueryStart> {
        let mut index = self.lock();
        let slot = index.slots.get_mut(pod)?;
        let mark = std::mem::replace(&mut slot.mark, Mark::Clean);
        slot.query_started_at = Some(Instant::now());
        Some(QueryStart { pod: slot.pod.clone(), mark, generation: self.now() })
    }

    /// Publishes an observation, even an unchanged one: its generation is new.
    pub fn publish(&self, seen: LatestObservation) {
        let mut index = self.lock();
        let Some(slot) = index.slots.get_mut(&seen.pod.id.uid) else { return };
        if seen.error.is_none() {
            slot.listed = None;
            slot.pod = seen.pod.id.clone();
        }
        slot.query_started_at = None;
        slot.sender.send_replace(Some(seen));
    }

    /// Records a complete list, and its state of pods that differ from their last observation; pods
    /// without any observation that are not in it get an empty one.
    pub fn listed(
        &self,
        generation: Generation,
        began_at: Timestamp,
        present: &HashSet<&str>,
        differing: Vec<Arc<ObservedPod>>,
    ) {
        let mut index = self.lock();
        index.listed = Some((generation, began_at));
        for slot in index.slots.values_mut() {
            if slot.sender.borrow().is_none() && !present.contains(slot.pod.uid.as_str()) {
                slot.sender.send_replace(Some(nothing(slot.pod.clone(), generation, began_at)));
            }
        }
        for pod in differing {
            let slot = index.slots.entry(pod.id.uid.clone()).or_insert_with(|| PodSlot::new(pod.id.clone(), None));
            slot.listed = Some(pod);
        }
    }

    /// Removes a pod without view and mark that is gone from the runtime.
    pub fn forget_unused(&self, pod: &PodUid) -> bool {
        let mut index = self.lock();
        let unused = index.slots.get(pod).is_none_or(PodSlot::is_unused);
        if unused {
            index.slots.remove(pod);
        }
        unused
    }

    /// Removes every pod that [`ObservationStore::forget_unused`] would remove; returns them.
    pub fn sweep(&self) -> Vec<PodUid> {
        let mut index = self.lock();
        if index.listed.is_none() {
            return Vec::new();
        }
        let unused: Vec<PodUid> =
            index.slots.iter().filter(|(_, s)| s.is_unused()).map(|(uid, _)| uid.clone()).collect();
        for uid in &unused {
            index.slots.remove(uid);
        }
        unused
    }

    /// All known pods of the runtime, without a query; `None` before the first complete list.
    pub fn known(&self) -> Option<RuntimePods> {
        let index = self.lock();
        index.listed?;
        let pods = index.slots.iter().filter_map(|(uid, slot)| Some((uid.clone(), slot.last_known()?)));
        Some(RuntimePods { pods: pods.collect() })
    }

    /// One pod of [`ObservationStore::known`].
    pub fn known_pod(&self, pod: &PodUid) -> Option<Arc<ObservedPod>> {
        let index = self.lock();
        index.listed?;
        index.slots.get(pod)?.last_known()
    }

    /// Whether anything of a pod may be alive; true before the first complete list.
    pub fn may_be_alive(&self, pod: &PodUid) -> bool {
        let index = self.lock();
        let alive = |slot: &PodSlot| slot.last_known().is_some_and(|seen| seen.is_alive());
        index.listed.is_none() || index.slots.get(pod).is_some_and(alive)
    }

    /// The pod of the latest observation, or an empty one without any.
    pub fn latest(&self, pod: &PodUid) -> Option<Arc<ObservedPod>> {
        let index = self.lock();
        let slot = index.slots.get(pod)?;
        let seen = slot.sender.borrow().as_ref().map(|o| o.pod.clone());
        let never = || Arc::new(ObservedPod::empty(slot.pod.clone(), Generation(0), Timestamp::UNIX_EPOCH));
        Some(seen.unwrap_or_else(never))
    }

    /// Pods whose query has been running for longer than `limit`.
    pub fn stuck(&self, limit: Duration) -> Vec<(PodRef, Duration)> {
        let index = self.lock();
        let since = index.slots.values().filter_map(|s| Some((s.pod.clone(), s.query_started_at?.elapsed())));
        since.filter(|(_, age)| *age > limit).collect()
    }

    /// Number of pods with a slot.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.lock().slots.len()
    }

    fn lock(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PodSlot {
    fn new(pod: PodRef, seen: Option<LatestObservation>) -> Self {
        Self {
            pod,
            sender: watch::Sender::new(seen),
            listed: None,
            mark: Mark::Clean,
            query_started_at: None,
            acted: Generation(0),
        }
    }

    /// The last known state, unless the pod is gone.
    fn last_known(&self) -> Option<Arc<ObservedPod>> {
        let latest = self.listed.clone().or_else(|| self.sender.borrow().as_ref().map(|seen| seen.pod.clone()));
        latest.filter(|pod| !pod.is_absent())
    }

    fn is_unused(&self) -> bool {
        let holds_nothing = self.sender.borrow().as_ref().is_none_or(|seen| seen.pod.is_absent());
        holds_nothing
            && self.sender.receiver_count() == 0
            && self.mark == Mark::Clean
            && self.query_started_at.is_none()
            && self.listed.as_ref().is_none_or(|pod| pod.is_absent())
    }
}

fn nothing(pod: PodRef, generation: Generation, began_at: Timestamp) -> LatestObservation {
    LatestObservation { pod: Arc::new(ObservedPod::empty(pod, generation, began_at)), generation, error: None }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn pod(uid: &str) -> PodRef {
        PodRef { uid: uid.into(), name: "web".into(), namespace: "default".into() }
    }

    #[test]
    fn marks_coalesce_until_a_query_begins() {
        let (store, mut marked) = ObservationStore::new();
        let uid = PodUid::from("u1");
        let first = store.acted(&uid);
        store.mark(&uid, Mark::Changed);
        let second = store.acted(&uid);
        assert!(second > first);
        assert_eq!(marked.try_recv().ok(), Some(uid.clone()));
        assert!(marked.try_recv().is_err(), "marked once");
        let begun = store.begin(&uid).expect("a slot");
        assert_eq!((begun.mark, begun.generation), (Mark::Acted, second));
        assert!(store.acted(&uid) > begun.generation);
        assert!(marked.try_recv().is_ok(), "an action during the look marks again");
    }

    #[test]
    fn a_pod_that_the_runtime_does_not_hold_is_empty_after_the_first_list() {
        let (store, mut marked) = ObservationStore::new();
        let mut early = store.view(&pod("u1"));
        assert!(early.latest().is_none());
        assert!(store.known().is_none());
        store.listed(store.now(), Timestamp::UNIX_EPOCH, &HashSet::from(["u2"]), Vec::new());
        assert!(early.latest().expect("listed").pod.is_absent());
        assert!(store.view(&pod("u3")).latest().expect("at once").pod.is_absent());
        assert!(store.known().expect("listed").pods.is_empty());
        assert!(marked.try_recv().is_err(), "without a look");
    }

    #[tokio::test]
    async fn a_new_view_waits_for_an_observation_after_the_last_action() {
        let (store, _marked) = ObservationStore::new();
        let (id, uid) = (pod("u1"), PodUid::from("u1"));
        let observation = |generation| nothing(id.clone(), generation, Timestamp::UNIX_EPOCH);
        drop(store.view(&id));
        let before = store.now();
        store.publish(observation(before));
        let acted = store.acted(&uid);
        let mut second = store.view(&id);
        assert_eq!(second.fresh(Generation(0)).now_or_never(), None, "that look is older than the action");
        store.publish(observation(acted));
        assert_eq!(second.fresh(Generation(0)).await.generation, acted);
    }

    #[test]
    fn slots_live_as_long_as_views_or_runtime_objects() {
        let (store, _marked) = ObservationStore::new();
        store.listed(store.now(), Timestamp::UNIX_EPOCH, &HashSet::new(), Vec::new());
        let view = store.view(&pod("u1"));
        assert!(!store.forget_unused(&"u1".into()));
        drop(view);
        assert_eq!(store.sweep(), [PodUid::from("u1")]);
        store.acted(&"u2".into());
        assert!(store.sweep().is_empty(), "a marked pod stays");
        assert_eq!(store.len(), 1);
    }
}
