//! ConfigMap and Secret change detection strategy `Watch`: one shared reflector per object.
//!
//! A reflector starts with the first reference and stops with the last. The reflector of an immutable object stops once
//! the object is known. One whose object is not read for long is stopped, and restarted by the next read. The last
//! known object is served meanwhile, also after a panic of the reflector, which the next sweep restarts.
//!
//! Implements spec 02b §11, spec 10 §4.6, §8.5.

use std::{
    collections::{BTreeSet, HashMap},
    ops::ControlFlow,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::Notify,
    time::{Instant, timeout},
};
use tokio_util::{
    sync::CancellationToken,
    task::{AbortOnDropHandle, TaskTracker},
};
use tracing::error;

use super::{
    cached_object::CachedObject,
    change_notifier::ChangeNotifier,
    kinds::ObjectKind,
    reference_counts::{ObjectKey, ReferenceCounts},
};
use crate::{
    api::ApiClient,
    reflector::{Follower, Selection, follow},
};
use berth_metrics::ReflectorMetrics;
use berth_ports::ObjectError;
use berth_types::PodUid;

/// How long a read waits for the first sync. The kubelet waits one second and fails pods that start together; a pod
/// whose read timed out is notified after the sync.
const FIRST_SYNC: Duration = Duration::from_secs(10);
/// How long a read of an idle object waits for fresh data before the last known object is served.
const REVALIDATE: Duration = Duration::from_secs(1);
/// Minimum time without reads before the reflector of an object is stopped.
const IDLE: Duration = Duration::from_secs(60);

/// Dependencies of the watched objects.
#[derive(Clone)]
pub struct WatchedDeps {
    /// Client of the API server.
    pub api: Arc<dyn ApiClient>,
    /// Metrics of reflectors.
    pub metrics: ReflectorMetrics,
    /// Tracks the reflector tasks.
    pub tasks: TaskTracker,
    /// Stops all reflectors.
    pub stop: CancellationToken,
    /// Notifies pods of changed objects.
    pub notifier: ChangeNotifier,
}

/// Watched objects of one type.
pub struct WatchCache<T> {
    deps: WatchedDeps,
    /// Shared with the reflector tasks, which notify the users of their object.
    users: Arc<Mutex<ReferenceCounts>>,
    entries: Mutex<HashMap<ObjectKey, WatchCacheEntry<T>>>,
    idle_after: Duration,
}

struct WatchCacheEntry<T> {
    place: Arc<CacheSlot<T>>,
    /// `None` if the object is not reflected: it is immutable, idle, or everything stops.
    task: Option<AbortOnDropHandle<()>>,
    read: Instant,
    at_rest: bool,
}

/// Object on the server, or `None` if it does not exist.
type KnownObject<T> = Option<Arc<CachedObject<T>>>;

/// Cache slot of one object: its reflector writes, readers read.
struct CacheSlot<T> {
    key: ObjectKey,
    state: Mutex<SlotState<T>>,
    /// Notified when the object is known.
    synced: Notify,
    nudge: Notify,
}

struct SlotState<T> {
    /// `None` before the first sync.
    known: Option<KnownObject<T>>,
    /// Last known object from before the reflector was stopped; `None` after the next sync.
    kept: Option<KnownObject<T>>,
    /// A read gave up waiting for the first sync.
    given_up: bool,
}

/// Read that waits for the first sync. If it ends early for any reason, including cancellation, the pods are notified
/// after the sync.
struct SyncWaiter<'a, T> {
    place: &'a CacheSlot<T>,
    is_answered: bool,
}

impl<T> Drop for SyncWaiter<'_, T> {
    fn drop(&mut self) {
        if !self.is_answered {
            locked(&self.place.state).given_up = true;
        }
    }
}

fn locked<S>(mutex: &Mutex<S>) -> MutexGuard<'_, S> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T> CacheSlot<T> {
    fn new(key: ObjectKey, kept: Option<KnownObject<T>>) -> Self {
        let state = SlotState { known: None, kept, given_up: false };
        Self { key, state: Mutex::new(state), synced: Notify::new(), nudge: Notify::new() }
    }

    fn known(&self) -> Option<KnownObject<T>> {
        locked(&self.state).known.clone()
    }

    fn is_synced(&self) -> bool {
        locked(&self.state).known.is_some()
    }

    /// Whether the object is known and immutable.
    fn is_final(&self) -> bool
    where
        T: ObjectKind,
    {
        self.known().iter().flatten().any(|object| object.is_immutable())
    }

    async fn synced(&self) -> KnownObject<T> {
        loop {
            // Registered before the check, so that a notification in between is not lost.
            let synced = self.synced.notified();
            if let Some(known) = self.known() {
                return known;
            }
            synced.await;
        }
    }

    /// Returns the object as soon as it is known; `None` after the timeout.
    async fn get(&self) -> Option<KnownObject<T>> {
        let kept = locked(&self.state).kept.clone();
        let mut waiting = SyncWaiter { place: self, is_answered: false };
        let patience = if kept.is_some() { REVALIDATE } else { FIRST_SYNC };
        // The object may have arrived at the same time as the timeout.
        let known = timeout(patience, self.synced()).await.ok().or_else(|| self.known());
        waiting.is_answered = known.is_some() || kept.is_some();
        known.or(kept)
    }
}

impl<T: ObjectKind> WatchCache<T> {
    /// Returns an empty cache. `sync_frequency` is the maximum time between two reads of a mounted object.
    pub fn new(deps: WatchedDeps, sync_frequency: Duration) -> Self {
        let idle_after = IDLE.max(sync_frequency.saturating_mul(5));
        Self { deps, users: Arc::default(), entries: Mutex::default(), idle_after }
    }

    /// Replaces the pod's references; starts and stops reflectors accordingly.
    pub fn register(&self, pod: &PodUid, namespace: &str, names: BTreeSet<String>) {
        let mut entries = locked(&self.entries);
        let change = locked(&self.users).register(pod, namespace, names);
        for key in change.added {
            match entries.get(&key) {
                // A new reference may have granted permission to read the object.
                Some(entry) if !entry.place.is_synced() => entry.place.nudge.notify_one(),
                Some(_) => {}
                None => {
                    let entry = self.start(key.clone(), None);
                    entries.insert(key, entry);
                }
            }
        }
        change.unused.iter().for_each(|key| drop(entries.remove(key)));
    }

    /// Removes the pod's references; stops reflectors of unused objects.
    pub fn unregister(&self, pod: &PodUid) {
        let mut entries = locked(&self.entries);
        let unused = locked(&self.users).unregister(pod);
        unused.iter().for_each(|key| drop(entries.remove(key)));
    }

    /// Returns the last known object; waits only for the first sync.
    ///
    /// # Errors
    /// The object is not registered, does not exist, or was not synced in time.
    pub async fn get(&self, namespace: &str, name: &str) -> Result<Arc<CachedObject<T>>, ObjectError> {
        let place = self.place(namespace, name)?;
        let Some(known) = place.get().await else {
            let kind = T::SINGULAR;
            let text = format!("failed to sync {kind} cache: timed out waiting for the condition");
            return Err(ObjectError::Other(text));
        };
        known.ok_or_else(|| ObjectError::NotFound { kind: T::SINGULAR, name: name.to_owned() })
    }

    /// Stops the reflectors of objects that were not read for long, and restarts those that panicked.
    pub fn sweep(&self) {
        let now = Instant::now();
        for entry in locked(&self.entries).values_mut() {
            if now.duration_since(entry.read) >= self.idle_after && entry.place.is_synced() {
                entry.at_rest = true;
            }
            let has_ended = entry.task.as_ref().is_some_and(AbortOnDropHandle::is_finished);
            if entry.at_rest || has_ended {
                entry.task = None;
            }
            if has_ended && !entry.at_rest && !entry.place.is_final() {
                let (namespace, name) = (entry.place.key.namespace(), entry.place.key.name());
                error!(kind = T::SINGULAR, namespace, name, "Object watcher panicked, restarting");
                entry.task = self.task(&entry.place);
            }
        }
    }

    /// Stops all reflectors; the last known objects are still served.
    pub fn stop(&self) {
        // No reflector starts afterwards: `start` checks the token under the same lock.
        locked(&self.entries).values_mut().for_each(|entry| entry.task = None);
    }

    fn place(&self, namespace: &str, name: &str) -> Result<Arc<CacheSlot<T>>, ObjectError> {
        let key = ObjectKey::new(namespace, name);
        let mut entries = locked(&self.entries);
        let Some(entry) = entries.get_mut(&key) else {
            return Err(ObjectError::Other(format!("object {namespace:?}/{name:?} not registered")));
        };
        if entry.at_rest {
            if entry.place.is_final() {
                entry.at_rest = false;
            } else {
                *entry = self.start(entry.place.key.clone(), entry.place.known());
            }
        }
        entry.read = Instant::now();
        Ok(entry.place.clone())
    }

    fn start(&self, key: ObjectKey, kept: Option<KnownObject<T>>) -> WatchCacheEntry<T> {
        let place = Arc::new(CacheSlot::new(key, kept));
        WatchCacheEntry { task: self.task(&place), place, read: Instant::now(), at_rest: false }
    }

    /// Spawns a reflector for the slot; `None` after shutdown began.
    fn task(&self, place: &Arc<CacheSlot<T>>) -> Option<AbortOnDropHandle<()>> {
        let follower =
            ObjectFollower { place: place.clone(), users: self.users.clone(), notifier: self.deps.notifier.clone() };
        let following = follow(self.deps.api.clone(), follower, &self.deps.metrics);
        let is_stopped = self.deps.stop.is_cancelled();
        (!is_stopped).then(|| AbortOnDropHandle::new(self.deps.tasks.spawn(following)))
    }
}

/// Follower that stores one object and notifies its users of changes.
struct ObjectFollower<T> {
    place: Arc<CacheSlot<T>>,
    users: Arc<Mutex<ReferenceCounts>>,
    notifier: ChangeNotifier,
}

impl<T: ObjectKind> ObjectFollower<T> {
    /// Stores the server's state of the object. Ends the reflector of an immutable object.
    fn take(&self, known: KnownObject<T>, is_news: impl FnOnce(&SlotState<T>) -> bool) -> ControlFlow<()> {
        let is_final = known.as_ref().is_some_and(|object| object.is_immutable());
        let is_news = {
            let mut state = locked(&self.place.state);
            let is_news = is_news(&state);
            (state.known, state.kept) = (Some(known), None);
            is_news
        };
        self.place.synced.notify_waiters();
        if is_news {
            let pods: Vec<PodUid> = locked(&self.users).of(&self.place.key).cloned().collect();
            self.notifier.notify(pods);
        }
        if is_final { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    fn is_it(&self, (namespace, name): &(String, String)) -> bool {
        (namespace.as_str(), name.as_str()) == (self.place.key.namespace(), self.place.key.name())
    }
}

fn is_same<T>(old: &KnownObject<T>, new: &KnownObject<T>) -> bool {
    match (old, new) {
        (Some(old), Some(new)) => old.is_same(new),
        (old, new) => old.is_none() && new.is_none(),
    }
}

impl<T: ObjectKind> Follower for ObjectFollower<T> {
    type Object = T;
    type All = KnownObject<T>;

    fn selection(&self) -> Selection {
        Selection::one(T::RESOURCE, self.place.key.namespace(), self.place.key.name())
    }

    fn gather(&self, all: &mut KnownObject<T>, key: (String, String), object: Option<T>) {
        if self.is_it(&key) {
            *all = object.map(|object| Arc::new(object.into()));
        }
    }

    fn replace(&mut self, all: KnownObject<T>, _: &str) -> ControlFlow<()> {
        let news = all.clone();
        self.take(all, |state| match &state.known {
            Some(known) => !is_same(known, &news),
            // Waiting readers get the object now. Users are notified if a read gave up, or was served a stale object.
            None => state.given_up || state.kept.as_ref().is_some_and(|kept| !is_same(kept, &news)),
        })
    }

    fn change(&mut self, key: (String, String), object: Option<T>, _: &str) -> ControlFlow<()> {
        if !self.is_it(&key) {
            return ControlFlow::Continue(());
        }
        self.take(object.map(|object| Arc::new(object.into())), |_| true)
    }

    async fn nudged(&self) {
        self.place.nudge.notified().await;
    }
}
