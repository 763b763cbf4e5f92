//! Pod status manager: versioned cache of pod statuses with events and change notification.
//!
//!   worker ── set, terminate ──┐                  ┌─► snapshots (server, `why`)
//!   probes ── set_ready, … ────┼─► entry, version ┼─► changes, events (subscribers)
//!   housekeeping ── retain ────┘                  └─► unsent (the API sender)
//!
//! An update is computed outside the lock from a copy, stored if the entry did not change meanwhile, and recomputed
//! otherwise: the lock protects copies only. Implements spec 02b §8.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use jiff::Timestamp;
use tokio::sync::{broadcast, watch};
use tracing::error;

use super::{
    conditions::Containers,
    diff::{is_same, without_blanks},
    final_status::terminate,
    normalization::{TransitionError, accept, newly_ended},
    phase::Phase,
    previous_status::follows_object,
    status_merge::RemainingResources,
};
use berth_metrics::StatusMetrics;
use berth_types::{ContainerId, Pod, PodRef, PodUid, api};

/// Capacity of the event channel; a slow subscriber that misses more must read a snapshot.
const EVENTS: usize = 1024;

/// Result of an update.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum UpdateOutcome {
    /// Stored under this version.
    Accepted(u64),
    /// Equal to the stored status, or for a pod or container that is not known.
    Unchanged,
    /// Illegal transition from the stored status; already logged.
    Refused(TransitionError),
}

/// Change of a pod's status.
#[derive(Clone, PartialEq, Debug)]
pub enum StatusEvent {
    /// The first status of a pod.
    Added(PodUid, Arc<api::PodStatus>),
    /// A changed status.
    Updated(PodUid, Arc<api::PodStatus>),
    /// The last status of a pod: it is finished.
    Removed(PodUid, Arc<api::PodStatus>),
}

/// Cached status of a pod, for the API sender.
#[derive(Clone, PartialEq, Debug)]
pub struct CachedStatus {
    /// Identity of the pod.
    pub pod: PodRef,
    /// Whether the pod is static: the API server gets its status on the mirror pod.
    pub is_static: bool,
    /// Latest accepted status, whether or not the API server has it.
    pub status: Arc<api::PodStatus>,
    /// Version of the status, incremented with every stored update.
    pub version: u64,
    /// Time of the first unsent change; `None` where everything is sent.
    pub unsent_since: Option<Timestamp>,
    /// Whether the pod is finished on this node and may be deleted once the status is written.
    pub finished: bool,
    /// Whether containers of the pod may run or resources of it remain.
    pub remains: RemainingResources,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PodLifecycle {
    /// Containers may run.
    Goes,
    /// All containers are stopped.
    Stopped,
    /// The pod is finished.
    IsOver,
    /// Unchanged.
    Unknown,
}

/// Cache of the latest status of every pod. Shared as `Arc`.
pub struct StatusManager {
    entries: Mutex<HashMap<PodUid, CachedStatus>>,
    stored: AtomicU64,
    changes: watch::Sender<u64>,
    events: broadcast::Sender<StatusEvent>,
    metrics: StatusMetrics,
}

impl StatusManager {
    /// Creates an empty manager.
    pub fn new(metrics: StatusMetrics) -> Self {
        Self {
            entries: Mutex::default(),
            stored: AtomicU64::default(),
            changes: watch::Sender::new(0),
            events: broadcast::Sender::new(EVENTS),
            metrics,
        }
    }

    /// Latest status of a pod.
    pub fn status(&self, uid: &PodUid) -> Option<Arc<api::PodStatus>> {
        self.lock().get(uid).map(|e| e.status.clone())
    }

    /// Counter of stored and removed statuses: while it is unchanged, [`status`](Self::status) returns the same results
    /// as after the counter was read.
    pub fn stored(&self) -> u64 {
        self.stored.load(Ordering::Acquire)
    }

    /// The previous status for the next update of a pod; `None` where that is the status in the pod's API object.
    pub fn previous(&self, pod: &Pod) -> Option<Arc<api::PodStatus>> {
        self.status(pod.uid()).filter(|kept| !follows_object(pod, kept))
    }

    /// All statuses, unordered.
    pub fn snapshot(&self) -> Vec<(PodRef, Arc<api::PodStatus>)> {
        self.lock().values().map(|e| (e.pod.clone(), e.status.clone())).collect()
    }

    /// Counter that changes with any status; notifies its receivers.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Events from now on. A subscriber that lags must read a snapshot.
    pub fn events(&self) -> broadcast::Receiver<StatusEvent> {
        self.events.subscribe()
    }

    /// Stores a newly built status. Where the deletion of the pod was requested, an unchanged status is stored too, so
    /// that its termination proceeds.
    pub fn set(&self, pod: &Pod, status: api::PodStatus, now: Timestamp) -> UpdateOutcome {
        let first = pod.status.as_deref();
        let update = Update { pod, first, now, force: pod.is_deleting(), life: PodLifecycle::Goes };
        self.update(&update, |_| Some(status.clone()))
    }

    /// Like [`StatusManager::set`], for a pod without running containers: from then on a terminal phase may be
    /// published.
    pub fn set_stopped(&self, pod: &Pod, status: api::PodStatus, now: Timestamp) -> UpdateOutcome {
        let first = pod.status.as_deref();
        let update = Update { pod, first, now, force: pod.is_deleting(), life: PodLifecycle::Stopped };
        self.update(&update, |_| Some(status.clone()))
    }

    /// Stores the final status of a pod: containers without a known end count as failed (spec 02b §7.1).
    pub fn terminate(&self, pod: &Pod, now: Timestamp) -> UpdateOutcome {
        let update = Update { pod, first: pod.status.as_deref(), now, force: true, life: PodLifecycle::IsOver };
        self.update(&update, |old| Some(terminate(pod, old)))
    }

    /// Applies the result of a readiness probe and recomputes the pod's readiness.
    pub fn set_ready(&self, pod: &Pod, container: &ContainerId, ready: bool, now: Timestamp) -> UpdateOutcome {
        self.change(pod, now, |status| {
            let changed = own(status, container).is_some_and(|c| std::mem::replace(&mut c.ready, ready) != ready);
            if changed {
                recompute_readiness(pod, status);
            }
            changed
        })
    }

    /// Applies the result of a startup probe.
    pub fn set_started(&self, pod: &Pod, container: &ContainerId, started: bool, now: Timestamp) -> UpdateOutcome {
        self.change(pod, now, |status| {
            own(status, container).is_some_and(|c| c.started.replace(started) != Some(started))
        })
    }

    /// Replaces the cached status by the one that the API server returned, if their texts are equal, so that memory
    /// contains it only once.
    pub fn share(&self, uid: &PodUid, shown: &Arc<api::PodStatus>) {
        let Some(kept) = self.status(uid).filter(|kept| !Arc::ptr_eq(kept, shown) && is_same_text(kept, shown)) else {
            return;
        };
        if let Some(entry) = self.lock().get_mut(uid).filter(|entry| Arc::ptr_eq(&entry.status, &kept)) {
            entry.status = shown.clone();
        }
    }

    /// Removes all pods except these.
    pub fn retain(&self, uids: &HashSet<PodUid>) {
        let mut entries = self.lock();
        let before = entries.len();
        entries.retain(|uid, _| uids.contains(uid));
        if entries.len() < before {
            self.stored.fetch_add(1, Ordering::Release);
        }
    }

    /// Cache entry of a pod.
    pub fn cached(&self, uid: &PodUid) -> Option<CachedStatus> {
        self.lock().get(uid).cloned()
    }

    /// All cache entries, unordered.
    pub fn all_cached(&self) -> Vec<CachedStatus> {
        self.lock().values().cloned().collect()
    }

    /// Entries with changes that were not [`StatusManager::mark_sent`] yet, oldest first.
    pub fn unsent(&self) -> Vec<CachedStatus> {
        let mut all: Vec<CachedStatus> =
            self.lock().values().filter(|kept| kept.unsent_since.is_some()).cloned().collect();
        all.sort_by_key(|kept| kept.unsent_since);
        all
    }

    /// Records that this version was written; a newer one remains unsent, with its waiting time starting now.
    pub fn mark_sent(&self, uid: &PodUid, version: u64, now: Timestamp) {
        if let Some(entry) = self.lock().get_mut(uid)
            && let Some(since) = entry.unsent_since
        {
            entry.unsent_since = (entry.version > version).then_some(now);
            let waited = now.as_millisecond().saturating_sub(since.as_millisecond()).max(0);
            self.metrics.status_sync.observe(std::time::Duration::from_millis(waited.unsigned_abs()).as_secs_f64());
        }
    }

    /// Removes a pod that is deleted or whose name another pod has.
    pub fn forget(&self, uid: &PodUid) {
        let mut entries = self.lock();
        if entries.remove(uid).is_some() {
            self.stored.fetch_add(1, Ordering::Release);
        }
    }

    /// Updates a stored status; `change` returns whether it changed anything.
    fn change(&self, pod: &Pod, now: Timestamp, change: impl Fn(&mut api::PodStatus) -> bool) -> UpdateOutcome {
        let update = Update { pod, first: None, now, force: false, life: PodLifecycle::Unknown };
        self.update(&update, |old| {
            let mut status = old.clone();
            change(&mut status).then_some(status)
        })
    }

    /// Recomputes an update from the stored status until the status did not change during the computation.
    fn update(&self, update: &Update<'_>, make: impl Fn(&api::PodStatus) -> Option<api::PodStatus>) -> UpdateOutcome {
        let empty = api::PodStatus::default();
        loop {
            let cached = self.lock().get(update.pod.uid()).cloned();
            let kept = cached.as_ref().map(|e| &*e.status);
            let old = update.previous(kept).unwrap_or(&empty);
            let Some(status) = make(old) else { return UpdateOutcome::Unchanged };
            let status = match accept(update.pod, old, status, update.now) {
                Ok(status) => status,
                Err(refused) => {
                    error!(pod = %update.pod.object_name(), err = %refused, "Status update on pod aborted");
                    return UpdateOutcome::Refused(refused);
                }
            };
            let ended = newly_ended(kept.unwrap_or(old), &status);
            let entry = update.entry(cached.as_ref(), status);
            let is_unchanged =
                |before: &CachedStatus| before.remains == entry.remains && is_same(&before.status, &entry.status);
            if !update.force && cached.as_ref().is_some_and(is_unchanged) {
                return UpdateOutcome::Unchanged;
            }
            if !self.store(cached.as_ref().map(|e| &e.status), &entry) {
                continue;
            }
            for end in ended {
                self.metrics.container_ended(end.kind.metric_label(), end.exit_code, &end.reason);
            }
            self.publish(cached.as_ref(), &entry);
            return UpdateOutcome::Accepted(entry.version);
        }
    }

    /// Stores an entry over the status it was computed from; `false` after a concurrent update.
    fn store(&self, over: Option<&Arc<api::PodStatus>>, entry: &CachedStatus) -> bool {
        let mut entries = self.lock();
        let same = match (entries.get(&entry.pod.uid), over) {
            (Some(stored), Some(over)) => Arc::ptr_eq(&stored.status, over),
            (None, None) => true,
            _ => false,
        };
        if same {
            entries.insert(entry.pod.uid.clone(), entry.clone());
            self.stored.fetch_add(1, Ordering::Release);
        }
        same
    }

    fn publish(&self, before: Option<&CachedStatus>, entry: &CachedStatus) {
        let (uid, status) = (entry.pod.uid.clone(), entry.status.clone());
        let event = match before {
            Some(before) if before.finished && entry.finished => None,
            _ if entry.finished => Some(StatusEvent::Removed(uid, status)),
            None => Some(StatusEvent::Added(uid, status)),
            Some(_) => Some(StatusEvent::Updated(uid, status)),
        };
        if let Some(event) = event {
            // An error means that there are no subscribers.
            let _ = self.events.send(event);
        }
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PodUid, CachedStatus>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Parameters of an update.
struct Update<'a> {
    pod: &'a Pod,
    /// Previous status where nothing is stored.
    first: Option<&'a api::PodStatus>,
    now: Timestamp,
    /// Whether to store an unchanged status.
    force: bool,
    life: PodLifecycle,
}

impl<'a> Update<'a> {
    /// Previous status of the update. Only a newly built status may follow one other than the cached status.
    fn previous(&self, kept: Option<&'a api::PodStatus>) -> Option<&'a api::PodStatus> {
        let is_built = matches!(self.life, PodLifecycle::Goes | PodLifecycle::Stopped);
        kept.filter(|kept| !(is_built && follows_object(self.pod, kept))).or(self.first)
    }

    fn entry(&self, cached: Option<&CachedStatus>, status: api::PodStatus) -> CachedStatus {
        // A static pod may restart under its UID; any other finished pod stays finished.
        let was_finished = cached.is_some_and(|e| e.finished) && !self.pod.is_static();
        let remains = match self.life {
            PodLifecycle::Goes => RemainingResources::Something,
            PodLifecycle::Stopped | PodLifecycle::IsOver => RemainingResources::Nothing,
            PodLifecycle::Unknown => cached.map_or(RemainingResources::Something, |e| e.remains),
        };
        CachedStatus {
            pod: self.pod.id().clone(),
            is_static: self.pod.is_static(),
            status: Arc::new(status),
            version: cached.map_or(1, |e| e.version + 1),
            unsent_since: cached.and_then(|e| e.unsent_since).or(Some(self.now)),
            finished: was_finished || self.life == PodLifecycle::IsOver,
            remains,
        }
    }
}

/// Status of the container with that runtime ID, regular containers first.
fn own<'a>(status: &'a mut api::PodStatus, id: &ContainerId) -> Option<&'a mut api::ContainerStatus> {
    let is_own = |c: &&mut api::ContainerStatus| {
        c.container_id.as_deref().and_then(|full| full.split_once("://")).is_some_and(|(_, own)| own == id.as_str())
    };
    let lists = [&mut status.container_statuses, &mut status.init_container_statuses];
    lists.into_iter().flatten().flatten().find(is_own)
}

/// Whether the statuses are equal except for empty values, which servers may drop, and the order of conditions.
fn is_same_text(a: &api::PodStatus, b: &api::PodStatus) -> bool {
    let in_order = |status: &api::PodStatus| {
        let mut status = without_blanks(status);
        status.conditions.iter_mut().for_each(|conditions| conditions.sort_by(|a, b| a.type_.cmp(&b.type_)));
        status
    };
    in_order(a) == in_order(b)
}

fn recompute_readiness(pod: &Pod, status: &mut api::PodStatus) {
    let statuses: Vec<api::ContainerStatus> =
        status.init_container_statuses.iter().chain(&status.container_statuses).flatten().cloned().collect();
    let phase = Phase::of(status).unwrap_or(Phase::Pending);
    let containers = Containers { pod, statuses: &statuses, phase };
    let conditions = status.conditions.get_or_insert_default();
    for mut new in [containers.ready(conditions), containers.containers_ready()] {
        match conditions.iter_mut().find(|c| c.type_ == new.type_) {
            Some(place) => {
                // A probe worker has the pod object from its start, which may be of an older generation.
                new.observed_generation = new.observed_generation.max(place.observed_generation);
                *place = new;
            }
            None => conditions.push(new),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        fixture::{RuntimeState, StatusFixture, at, observed, pod, static_pod},
        lookup::{condition, exit},
    };
    use berth_metrics::Registry;

    fn manager() -> (StatusManager, Registry) {
        let registry = Registry::new();
        (StatusManager::new(StatusMetrics::new(&registry)), registry)
    }

    fn world(seen: RuntimeState) -> StatusFixture {
        StatusFixture::new(pod("Always", &["c"]), observed(&[("c", seen)]))
    }

    #[test]
    fn what_the_api_shows_word_by_word_is_kept_once() {
        let (manager, _) = manager();
        let world = world(RuntimeState::Running);
        manager.set(&world.pod, world.build(), at(10));
        let kept = || manager.cached(world.pod.uid()).expect("kept");
        // Like servers: conditions in another order, and empty values dropped.
        let mut shown = (*kept().status).clone();
        shown.conditions.as_mut().expect("conditions").reverse();
        shown.container_statuses.as_mut().expect("containers")[0].last_state = None;
        let shown = Arc::new(shown);
        let other = Arc::new(api::PodStatus { message: Some("other".to_owned()), ..(*shown).clone() });
        manager.share(world.pod.uid(), &other);
        assert!(!Arc::ptr_eq(&kept().status, &other) && !Arc::ptr_eq(&kept().status, &shown));
        manager.share(world.pod.uid(), &shown);
        assert!(Arc::ptr_eq(&kept().status, &shown));
        assert_eq!((kept().version, *manager.changes().borrow()), (1, 1), "nothing is published again");
        manager.share(&"unknown".into(), &shown);
        assert_eq!(manager.all_cached().len(), 1);
    }

    fn version(manager: &StatusManager) -> Option<u64> {
        manager.unsent().first().map(|u| u.version)
    }

    #[test]
    fn only_changes_make_versions() {
        // AC-02b-11
        let (manager, _) = manager();
        let mut world = world(RuntimeState::Running);
        let mut changes = manager.changes();
        assert_eq!(manager.set(&world.pod, world.build(), at(10)), UpdateOutcome::Accepted(1));
        world.previous = manager.status(world.pod.uid()).as_deref().cloned();
        assert_eq!(manager.set(&world.pod, world.build(), at(20)), UpdateOutcome::Unchanged);
        assert_eq!(*changes.borrow_and_update(), 1);
        world.observed = observed(&[("c", RuntimeState::Exited(1))]);
        assert_eq!(manager.set(&world.pod, world.build(), at(30)), UpdateOutcome::Accepted(2));
        assert!(changes.has_changed().expect("alive"));
        let unsent = manager.unsent();
        assert_eq!((unsent[0].version, unsent[0].unsent_since, unsent[0].finished), (2, Some(at(10)), false));
        assert_eq!(manager.stored(), 2);
        manager.mark_sent(world.pod.uid(), 2, at(40));
        assert_eq!(manager.stored(), 2, "the same status");
        manager.forget(world.pod.uid());
        assert_eq!(manager.stored(), 3, "none is another one");
    }

    #[test]
    fn a_status_from_before_the_mirror_pod_was_seen_is_replaced() {
        // AC-10a-38: row 7
        let (manager, _) = manager();
        let mut world = StatusFixture::new(static_pod("Always", &["c"]), observed(&[("c", RuntimeState::Running)]));
        let uid = world.pod.uid().clone();
        let starts = || manager.status(&uid).and_then(|s| s.start_time.clone()).map(|t| t.0);
        manager.set(&world.pod, world.build(), at(100));
        assert_eq!(starts(), Some(at(100)));
        let mut published = world.build();
        published.start_time = Some(at(10).into());
        for condition in published.conditions.iter_mut().flatten() {
            condition.last_transition_time = Some(at(11).into());
        }
        world.set_api_status(serde_json::to_value(&published).expect("JSON"));
        assert_eq!(manager.previous(&world.pod), None, "the mirror's");
        assert_eq!(manager.set(&world.pod, world.build(), at(101)), UpdateOutcome::Accepted(2));
        let status = manager.status(&uid).expect("a status");
        let times = status.conditions.iter().flatten().map(|c| c.last_transition_time.as_ref().map(|t| t.0));
        assert!(times.into_iter().all(|time| time == Some(at(11))), "{status:?}");
        assert_eq!((starts(), manager.previous(&world.pod)), (Some(at(10)), Some(status)));
        assert_eq!(manager.set(&world.pod, world.build(), at(102)), UpdateOutcome::Unchanged);
    }

    #[test]
    fn a_deleted_pod_is_stored_even_unchanged() {
        let (manager, _) = manager();
        let mut world = world(RuntimeState::Running);
        world.delete();
        assert_eq!(manager.set(&world.pod, world.build(), at(10)), UpdateOutcome::Accepted(1));
        assert_eq!(manager.set(&world.pod, world.build(), at(10)), UpdateOutcome::Accepted(2));
    }

    #[test]
    fn probe_results_change_readiness() {
        let (manager, _) = manager();
        let world = world(RuntimeState::Running);
        let (pod, id) = (&world.pod, ContainerId::from("c-0"));
        assert_eq!(manager.set_ready(pod, &id, false, at(1)), UpdateOutcome::Unchanged, "no status yet");
        manager.set(pod, world.build(), at(10));
        assert_eq!(manager.set_ready(pod, &id, true, at(20)), UpdateOutcome::Unchanged);
        assert_eq!(manager.set_ready(pod, &"other".into(), false, at(20)), UpdateOutcome::Unchanged);
        assert_eq!(manager.set_ready(pod, &id, false, at(20)), UpdateOutcome::Accepted(2));
        let status = manager.status(pod.uid()).expect("a status");
        for type_ in ["Ready", "ContainersReady"] {
            let actual = condition(&status, type_).expect("the condition");
            let changed = actual.last_transition_time.as_ref().map(|t| t.0);
            assert_eq!((actual.status.as_str(), changed), ("False", Some(at(20))), "{type_}");
        }
        assert_eq!(manager.set_started(pod, &id, true, at(30)), UpdateOutcome::Unchanged);
        assert_eq!(manager.set_started(pod, &id, false, at(30)), UpdateOutcome::Accepted(3));
    }

    #[test]
    fn a_probe_that_knows_an_older_pod_sets_no_generation_back() {
        let (manager, _) = manager();
        let world = world(RuntimeState::Running);
        let newer = world.pod.generation();
        let mut older = world.pod.to_object();
        older.metadata.generation = Some(newer - 1);
        let older = Pod::new(older).expect("complete");
        manager.set(&world.pod, world.build(), at(10));
        assert_eq!(manager.set_ready(&older, &"c-0".into(), false, at(20)), UpdateOutcome::Accepted(2));
        let status = manager.status(older.uid()).expect("a status");
        let actual = condition(&status, "Ready").expect("the condition");
        assert_eq!((actual.status.as_str(), actual.observed_generation), ("False", Some(newer)));
    }

    #[test]
    fn the_terminal_status_is_published_once_and_stays() {
        // AC-02b-13
        let (manager, _) = manager();
        let mut events = manager.events();
        let world = world(RuntimeState::Running);
        manager.set(&world.pod, world.build(), at(10));
        assert_eq!(manager.terminate(&world.pod, at(20)), UpdateOutcome::Accepted(2));
        let status = manager.status(world.pod.uid()).expect("a status");
        let ended = status.container_statuses.iter().flatten().all(|c| exit(c).is_some());
        assert_eq!((status.phase.as_deref(), ended), (Some("Failed"), true));
        manager.set(&world.pod, world.build(), at(30));
        assert!(manager.unsent()[0].finished, "never reset");
        let mut kinds = Vec::new();
        while let Ok(event) = events.try_recv() {
            kinds.push(match event {
                StatusEvent::Added(..) => "added",
                StatusEvent::Updated(..) => "updated",
                StatusEvent::Removed(..) => "removed",
            });
        }
        assert_eq!(kinds, ["added", "removed"]);
        let fixed = StatusFixture::new(static_pod("Always", &["c"]), observed(&[]));
        manager.forget(fixed.pod.uid());
        manager.terminate(&fixed.pod, at(20));
        manager.set(&fixed.pod, fixed.build(), at(30));
        assert!(!manager.unsent()[0].finished, "a static pod comes back");
    }

    #[test]
    fn illegal_moves_store_nothing() {
        let (manager, _) = manager();
        let mut world = StatusFixture::new(pod("Never", &["c"]), observed(&[("c", RuntimeState::Exited(1))]));
        manager.set(&world.pod, world.build(), at(10));
        world.observed = observed(&[("c", RuntimeState::Running)]);
        let refused = manager.set(&world.pod, world.build(), at(20));
        assert_eq!(refused, UpdateOutcome::Refused(TransitionError::LeftTerminated("c".to_owned())));
        assert_eq!(version(&manager), Some(1));
    }

    #[test]
    fn ends_are_counted_once() {
        // AC-08-6
        let (manager, registry) = manager();
        let mut world = StatusFixture::new(pod("Never", &["c"]), observed(&[("c", RuntimeState::Running)]));
        for seen in [RuntimeState::Running, RuntimeState::Exited(0), RuntimeState::Exited(0)] {
            world.observed = observed(&[("c", seen)]);
            manager.set(&world.pod, world.build(), at(10));
        }
        manager.terminate(&world.pod, at(20));
        let families = registry.gather();
        let family = families.iter().find(|f| f.name() == "kubelet_terminated_containers_total").expect("counted");
        let series = family.get_metric();
        let labels: Vec<&str> = series[0].get_label().iter().map(|l| l.value()).collect();
        assert_eq!(
            (series.len(), series[0].get_counter().get_value(), labels),
            (1, 1.0, vec!["container", "0", "Error"])
        );
    }

    #[test]
    fn that_nothing_runs_any_more_is_a_change() {
        // AC-02b-12
        let (manager, _) = manager();
        let world = world(RuntimeState::Exited(0));
        manager.set(&world.pod, world.build(), at(10));
        let remains = || manager.unsent()[0].remains;
        assert_eq!(
            (manager.set(&world.pod, world.build(), at(20)), remains()),
            (UpdateOutcome::Unchanged, RemainingResources::Something)
        );
        let stopped = manager.set_stopped(&world.pod, world.build(), at(30));
        assert_eq!((stopped, remains()), (UpdateOutcome::Accepted(2), RemainingResources::Nothing));
        manager.set_ready(&world.pod, &"c-0".into(), true, at(40));
        assert_eq!(remains(), RemainingResources::Nothing, "a probe knows nothing of it");
    }

    #[test]
    fn what_was_sent_is_not_sent_again() {
        let (manager, registry) = manager();
        let mut world = world(RuntimeState::Running);
        let uid = world.pod.uid().clone();
        manager.set(&world.pod, world.build(), at(10));
        world.observed = observed(&[("c", RuntimeState::Exited(1))]);
        manager.set(&world.pod, world.build(), at(12));
        manager.mark_sent(&uid, 1, at(15));
        assert_eq!(manager.unsent()[0].unsent_since, Some(at(15)), "version 2 waits since then");
        manager.mark_sent(&uid, 2, at(16));
        assert_eq!(manager.unsent(), []);
        let families = registry.gather();
        let family = families.iter().find(|f| f.name() == "kubelet_pod_status_sync_duration_seconds").expect("there");
        let histogram = family.get_metric()[0].get_histogram();
        assert_eq!((histogram.get_sample_count(), histogram.get_sample_sum()), (2, 6.0));
    }

    #[test]
    fn orphans_are_forgotten() {
        // AC-02b-14
        let (manager, _) = manager();
        let world = world(RuntimeState::Running);
        manager.set(&world.pod, world.build(), at(10));
        manager.retain(&HashSet::from([world.pod.uid().clone()]));
        assert_eq!((manager.snapshot().len(), manager.stored()), (1, 1));
        manager.retain(&HashSet::new());
        assert_eq!((manager.status(world.pod.uid()), manager.stored()), (None, 2));
        assert_eq!(manager.set(&world.pod, world.build(), at(20)), UpdateOutcome::Accepted(1));
    }

    #[test]
    fn concurrent_updates_do_not_lose_each_other() {
        let (manager, _) = manager();
        let world = StatusFixture::new(
            pod("Always", &["c", "d"]),
            observed(&[("c", RuntimeState::Running), ("d", RuntimeState::Running)]),
        );
        manager.set(&world.pod, world.build(), at(10));
        std::thread::scope(|scope| {
            for id in ["c-0", "d-0"] {
                let (manager, pod) = (&manager, &world.pod);
                scope.spawn(move || {
                    for i in 0..200 {
                        manager.set_ready(pod, &id.into(), i % 2 == 0, at(20 + i));
                    }
                });
            }
        });
        let status = manager.status(world.pod.uid()).expect("a status");
        let ready: Vec<bool> = status.container_statuses.iter().flatten().map(|c| c.ready).collect();
        assert_eq!((ready, version(&manager)), (vec![false, false], Some(1 + 2 * 199)));
    }
}
