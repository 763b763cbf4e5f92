//! Strategy `Watch`: one reflector per object, shared by all pods that use it. Spec 02b §11,
//! spec 10 §4.6, §8.5.
//!
//! It begins with the first user and ends with the last. That of an immutable object ends once the
//! object is known; one that nobody reads for long is put to rest and asked again when somebody
//! does. What was known is served meanwhile.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::Notify,
    time::{Instant, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    changes::Teller,
    kinds::ObjectKind,
    users::{Key, Users},
};
use crate::{
    engine::ports::ObjectError,
    kube::{
        api::ApiClient,
        reflector::{ReflectorDeps, Selection, reflect},
        store::Store,
    },
    metrics::ReflectorMetrics,
    pod::PodUid,
};

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
    store: Store<T>,
    /// What was known before it was put to rest.
    kept: Option<Store<T>>,
    nudge: Arc<Notify>,
    stop: CancellationToken,
    read: Instant,
    at_rest: bool,
    /// Somebody stopped waiting for the first sync.
    given_up: Arc<AtomicBool>,
}

/// Somebody waits for the first sync. Whoever stops before it comes, for whatever reason, is told of it later.
struct Waiting {
    given_up: Arc<AtomicBool>,
    is_answered: bool,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if !self.is_answered {
            self.given_up.store(true, Ordering::Relaxed);
        }
    }
}

fn locked<S>(mutex: &Mutex<S>) -> MutexGuard<'_, S> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T: ObjectKind> Watched<T> {
    /// Nothing is used yet; `sync_frequency` is how often a pod reads what it mounts at least.
    pub fn new(deps: WatchedDeps, sync_frequency: Duration) -> Self {
        let idle_after = IDLE.max(sync_frequency.saturating_mul(5));
        Self { deps, users: Arc::default(), entries: Mutex::default(), idle_after }
    }

    /// The pod uses these, and no others.
    pub fn register(&self, pod: &PodUid, namespace: &str, names: std::collections::BTreeSet<String>) {
        let mut entries = locked(&self.entries);
        let change = locked(&self.users).register(pod, namespace, names);
        for key in change.added {
            match entries.get(&key) {
                // It may be readable now that a pod of ours refers to it.
                Some(entry) if !entry.store.snapshot().synced => entry.nudge.notify_one(),
                Some(_) => {}
                None => {
                    let entry = self.start(&key, None);
                    entries.insert(key, entry);
                }
            }
        }
        drop_all(&mut entries, change.unused);
    }

    /// The pod is gone.
    pub fn unregister(&self, pod: &PodUid) {
        let mut entries = locked(&self.entries);
        let unused = locked(&self.users).unregister(pod);
        drop_all(&mut entries, unused);
    }

    /// The object as it is known now; waits for the first sync only.
    ///
    /// # Errors
    /// It is not registered, does not exist, or could not be read in time.
    pub async fn get(&self, namespace: &str, name: &str) -> Result<Arc<T>, ObjectError> {
        let (mut store, kept, given_up) = self.entry(namespace, name)?;
        let patience = if kept.is_some() { REVALIDATE } else { FIRST_SYNC };
        let mut waiting = Waiting { given_up, is_answered: false };
        let outcome = timeout(patience, store.synced()).await;
        waiting.is_answered = outcome.is_ok() || kept.is_some();
        let found = match (outcome, kept) {
            (Ok(()), _) => store.get(namespace, name),
            (Err(_), Some(kept)) => kept.get(namespace, name),
            (Err(_), None) => {
                let kind = T::SINGULAR;
                let text = format!("failed to sync {kind} cache: timed out waiting for the condition");
                return Err(ObjectError::Other(text));
            }
        };
        found.ok_or_else(|| ObjectError::NotFound { kind: T::SINGULAR, name: name.to_owned() })
    }

    /// Puts to rest what nobody has read for long.
    pub fn sweep(&self) {
        let now = Instant::now();
        for entry in locked(&self.entries).values_mut() {
            if now.duration_since(entry.read) >= self.idle_after && entry.store.snapshot().synced {
                entry.at_rest = true;
                entry.stop.cancel();
            }
        }
    }

    #[expect(clippy::type_complexity, reason = "what a read needs of an entry, taken out under the lock")]
    fn entry(&self, namespace: &str, name: &str) -> Result<(Store<T>, Option<Store<T>>, Arc<AtomicBool>), ObjectError> {
        let key = (namespace.to_owned(), name.to_owned());
        let mut entries = locked(&self.entries);
        let Some(entry) = entries.get_mut(&key) else {
            return Err(ObjectError::Other(format!("object {namespace:?}/{name:?} not registered")));
        };
        if entry.at_rest {
            let is_final = entry.store.get(namespace, name).is_some_and(|object| object.is_immutable());
            if is_final {
                entry.at_rest = false;
            } else {
                *entry = self.start(&key, Some(entry.store.clone()));
            }
        }
        entry.read = Instant::now();
        Ok((entry.store.clone(), entry.kept.clone(), entry.given_up.clone()))
    }

    fn start(&self, key: &Key, kept: Option<Store<T>>) -> Entry<T> {
        let (nudge, stop, given_up) = (Arc::new(Notify::new()), self.deps.stop.child_token(), Arc::default());
        let deps = ReflectorDeps { metrics: self.deps.metrics.clone(), stop: stop.clone(), nudge: nudge.clone() };
        let selection = Selection::one(T::RESOURCE, &key.0, &key.1);
        let (store, run) = reflect::<T>(self.deps.api.clone(), selection, deps);
        let follow = Follow {
            store: store.clone(),
            key: key.clone(),
            users: self.users.clone(),
            teller: self.deps.teller.clone(),
            given_up: Arc::clone(&given_up),
        };
        let (run, follow) = (Box::pin(run), Box::pin(follow.run()));
        self.deps.tasks.spawn(async move {
            tokio::select! {
                () = run => {}
                () = follow => {}
            }
        });
        Entry { store, kept, nudge, stop, read: Instant::now(), at_rest: false, given_up }
    }
}

fn drop_all<T>(entries: &mut HashMap<Key, Entry<T>>, unused: Vec<Key>) {
    for entry in unused.iter().filter_map(|key| entries.remove(key)) {
        entry.stop.cancel();
    }
}

/// Tells an object's users of its changes.
struct Follow<T> {
    store: Store<T>,
    key: Key,
    users: Arc<Mutex<Users>>,
    teller: Teller,
    given_up: Arc<AtomicBool>,
}

impl<T: ObjectKind> Follow<T> {
    /// Returns once there is nothing more to follow.
    async fn run(mut self) {
        self.store.synced().await;
        // Who waits for it has it now; who gave up comes again for it.
        if self.given_up.load(Ordering::Relaxed) {
            self.tell();
        }
        while !self.store.get(&self.key.0, &self.key.1).is_some_and(|object| object.is_immutable()) {
            self.store.changed().await;
            self.tell();
        }
    }

    fn tell(&self) {
        let pods: Vec<PodUid> = locked(&self.users).of(&self.key).cloned().collect();
        self.teller.tell(pods);
    }
}
