//! Strategy `Watch`: one reflector per object, shared by all pods that use it. Spec 02b §11,
//! spec 10 §4.6, §8.5.
//!
//! It begins with the first user and ends with the last. That of an immutable object ends once the
//! object is known; one that nobody reads for long is put to rest and asked again when somebody
//! does. What was known is served meanwhile, also where a reflector has panicked, until the next sweep begins it anew.

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
    changes::Teller,
    held::Held,
    kinds::ObjectKind,
    users::{Key, Users},
};
use crate::{
    api::ApiClient,
    reflector::{Follower, Selection, follow},
};
use berth_metrics::ReflectorMetrics;
use berth_ports::ObjectError;
use berth_types::PodUid;

/// How long a read waits for the first sync. The reference waits a second and fails pods that
/// start together; who gives up is told of the sync later.
const FIRST_SYNC: Duration = Duration::from_secs(10);
/// How long a read of an object at rest waits before what was known is served.
const REVALIDATE: Duration = Duration::from_secs(1);
/// The least time without reads before an object is put to rest.
const IDLE: Duration = Duration::from_secs(60);

/// What the watches need of others.
#[derive(Clone)]
pub struct WatchedDeps {
    /// The API server.
    pub api: Arc<dyn ApiClient>,
    /// What is counted of reflectors.
    pub metrics: ReflectorMetrics,
    /// Where tasks are counted.
    pub tasks: TaskTracker,
    /// Ends all of them.
    pub stop: CancellationToken,
    /// Where changes are told.
    pub teller: Teller,
}

/// The objects of one kind.
pub struct Watched<T> {
    deps: WatchedDeps,
    /// Shared with the tasks: they ask who is to be told.
    users: Arc<Mutex<Users>>,
    entries: Mutex<HashMap<Key, Entry<T>>>,
    idle_after: Duration,
}

struct Entry<T> {
    place: Arc<Place<T>>,
    /// Nobody follows it: it will not change, it is at rest, or everything stops.
    task: Option<AbortOnDropHandle<()>>,
    read: Instant,
    at_rest: bool,
}

/// What the server said: the object, or that there is none.
type Known<T> = Option<Arc<Held<T>>>;

/// Where one object is kept: its task writes, who asks for the object reads.
struct Place<T> {
    key: Key,
    state: Mutex<State<T>>,
    /// It is known now.
    synced: Notify,
    nudge: Notify,
}

struct State<T> {
    /// `None` before the first sync.
    known: Option<Known<T>>,
    /// What was known before it was put to rest, until it is known anew.
    kept: Option<Known<T>>,
    /// Somebody stopped waiting for the first sync.
    given_up: bool,
}

/// Somebody waits for the first sync. Whoever stops before it comes, for whatever reason, is told of it later.
struct Waiting<'a, T> {
    place: &'a Place<T>,
    is_answered: bool,
}

impl<T> Drop for Waiting<'_, T> {
    fn drop(&mut self) {
        if !self.is_answered {
            locked(&self.place.state).given_up = true;
        }
    }
}

fn locked<S>(mutex: &Mutex<S>) -> MutexGuard<'_, S> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T> Place<T> {
    fn new(key: Key, kept: Option<Known<T>>) -> Self {
        let state = State { known: None, kept, given_up: false };
        Self { key, state: Mutex::new(state), synced: Notify::new(), nudge: Notify::new() }
    }

    fn known(&self) -> Option<Known<T>> {
        locked(&self.state).known.clone()
    }

    fn is_synced(&self) -> bool {
        locked(&self.state).known.is_some()
    }

    /// Whether it is known and will never change.
    fn is_final(&self) -> bool
    where
        T: ObjectKind,
    {
        self.known().iter().flatten().any(|object| object.is_immutable())
    }

    async fn synced(&self) -> Known<T> {
        loop {
            // Before the look: what comes between the two is not missed.
            let synced = self.synced.notified();
            if let Some(known) = self.known() {
                return known;
            }
            synced.await;
        }
    }

    /// The object, as soon as it is known; `None` where it is not in time.
    async fn get(&self) -> Option<Known<T>> {
        let kept = locked(&self.state).kept.clone();
        let mut waiting = Waiting { place: self, is_answered: false };
        let patience = if kept.is_some() { REVALIDATE } else { FIRST_SYNC };
        // It may have come with the end of the patience.
        let known = timeout(patience, self.synced()).await.ok().or_else(|| self.known());
        waiting.is_answered = known.is_some() || kept.is_some();
        known.or(kept)
    }
}

impl<T: ObjectKind> Watched<T> {
    /// Nothing is used yet; `sync_frequency` is how often a pod reads what it mounts at least.
    pub fn new(deps: WatchedDeps, sync_frequency: Duration) -> Self {
        let idle_after = IDLE.max(sync_frequency.saturating_mul(5));
        Self { deps, users: Arc::default(), entries: Mutex::default(), idle_after }
    }

    /// The pod uses these, and no others.
    pub fn register(&self, pod: &PodUid, namespace: &str, names: BTreeSet<String>) {
        let mut entries = locked(&self.entries);
        let change = locked(&self.users).register(pod, namespace, names);
        for key in change.added {
            match entries.get(&key) {
                // It may be readable now that a pod of ours refers to it.
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

    /// The pod is gone.
    pub fn unregister(&self, pod: &PodUid) {
        let mut entries = locked(&self.entries);
        let unused = locked(&self.users).unregister(pod);
        unused.iter().for_each(|key| drop(entries.remove(key)));
    }

    /// The object as it is known now; waits for the first sync only.
    ///
    /// # Errors
    /// It is not registered, does not exist, or could not be read in time.
    pub async fn get(&self, namespace: &str, name: &str) -> Result<Arc<Held<T>>, ObjectError> {
        let place = self.place(namespace, name)?;
        let Some(known) = place.get().await else {
            let kind = T::SINGULAR;
            let text = format!("failed to sync {kind} cache: timed out waiting for the condition");
            return Err(ObjectError::Other(text));
        };
        known.ok_or_else(|| ObjectError::NotFound { kind: T::SINGULAR, name: name.to_owned() })
    }

    /// Puts to rest what nobody has read for long, and follows anew what a task has left before its time.
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
                error!(kind = T::SINGULAR, namespace, name, "What follows an object has panicked, and begins anew");
                entry.task = self.task(&entry.place);
            }
        }
    }

    /// Follows nothing any more; what is known is served.
    pub fn stop(&self) {
        // Nothing is started after this: `start` looks at the token under the same lock.
        locked(&self.entries).values_mut().for_each(|entry| entry.task = None);
    }

    fn place(&self, namespace: &str, name: &str) -> Result<Arc<Place<T>>, ObjectError> {
        let key = Key::new(namespace, name);
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

    fn start(&self, key: Key, kept: Option<Known<T>>) -> Entry<T> {
        let place = Arc::new(Place::new(key, kept));
        Entry { task: self.task(&place), place, read: Instant::now(), at_rest: false }
    }

    /// Follows what is kept there; nothing once everything stops.
    fn task(&self, place: &Arc<Place<T>>) -> Option<AbortOnDropHandle<()>> {
        let follower = Single { place: place.clone(), users: self.users.clone(), teller: self.deps.teller.clone() };
        let following = follow(self.deps.api.clone(), follower, &self.deps.metrics);
        let is_stopped = self.deps.stop.is_cancelled();
        (!is_stopped).then(|| AbortOnDropHandle::new(self.deps.tasks.spawn(following)))
    }
}

/// Keeps one object, and tells its users of changes.
struct Single<T> {
    place: Arc<Place<T>>,
    users: Arc<Mutex<Users>>,
    teller: Teller,
}

impl<T: ObjectKind> Single<T> {
    /// The server says that it is like this now. Ends with what will never change.
    fn take(&self, known: Known<T>, is_news: impl FnOnce(&State<T>) -> bool) -> ControlFlow<()> {
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
            self.teller.tell(pods);
        }
        if is_final { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    fn is_it(&self, (namespace, name): &(String, String)) -> bool {
        (namespace.as_str(), name.as_str()) == (self.place.key.namespace(), self.place.key.name())
    }
}

fn is_same<T>(old: &Known<T>, new: &Known<T>) -> bool {
    match (old, new) {
        (Some(old), Some(new)) => old.is_same(new),
        (old, new) => old.is_none() && new.is_none(),
    }
}

impl<T: ObjectKind> Follower for Single<T> {
    type Object = T;
    type All = Known<T>;

    fn selection(&self) -> Selection {
        Selection::one(T::RESOURCE, self.place.key.namespace(), self.place.key.name())
    }

    fn gather(&self, all: &mut Known<T>, key: (String, String), object: Option<T>) {
        if self.is_it(&key) {
            *all = object.map(|object| Arc::new(object.into()));
        }
    }

    fn replace(&mut self, all: Known<T>, _: &str) -> ControlFlow<()> {
        let news = all.clone();
        self.take(all, |state| match &state.known {
            Some(known) => !is_same(known, &news),
            // Who waits for it has it now; who gave up comes again for it, and so does who was given what was kept.
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
