//! ConfigMap and Secret change detection strategies `Cache` and `Get`: objects are read on demand.
//!
//! Implements spec 02b §11, spec 10 §4.6.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::watch,
    time::{Instant, sleep},
};

use super::{
    cached_object::CachedObject,
    kinds::ObjectKind,
    reference_counts::{ObjectKey, ReferenceCounts},
};
use crate::{
    api::{ApiClient, ApiError, Call, TypedClient},
    reflector::QuickRetry,
};
use berth_ports::ObjectError;
use berth_types::PodUid;

/// Deadline of one read.
const READ_LIMIT: Duration = Duration::from_secs(10);

/// Reads an object; `cached` permits the server to answer from its watch cache.
///
/// # Errors
/// The server refused the read or did not answer.
async fn read<T: ObjectKind>(
    api: &Arc<dyn ApiClient>,
    (namespace, name): (&str, &str),
    cached: bool,
) -> Result<CachedObject<T>, ApiError> {
    let began = Instant::now();
    let mut quick = QuickRetry::default();
    loop {
        let call = Call::get(T::RESOURCE, namespace, name).within(READ_LIMIT);
        let call = if cached { call.query("resourceVersion", "0") } else { call };
        match api.ask::<T>(call).await {
            // The node authorizer may not have observed the pod yet.
            Err(error) if error.is_forbidden() => match quick.pause(began.elapsed()) {
                Some(pause) => sleep(pause).await,
                None => return Err(error),
            },
            other => return other.map(Into::into),
        }
    }
}

fn object_error(error: &ApiError, kind: &'static str, name: &str) -> ObjectError {
    if error.is_not_found() {
        ObjectError::NotFound { kind, name: name.to_owned() }
    } else {
        ObjectError::Other(error.to_string())
    }
}

/// Strategy `Get`: reads from the server each time.
///
/// # Errors
/// The object does not exist, or the read failed.
pub async fn get<T: ObjectKind>(
    api: &Arc<dyn ApiClient>,
    namespace: &str,
    name: &str,
) -> Result<Arc<CachedObject<T>>, ObjectError> {
    let read = read::<T>(api, (namespace, name), false).await;
    read.map(Arc::new).map_err(|error| object_error(&error, T::RESOURCE.plural, name))
}

/// Strategy `Cache`: an object is served from the cache until its TTL expires.
pub struct TtlCache<T> {
    api: Arc<dyn ApiClient>,
    /// TTL of cached objects.
    ttl: watch::Receiver<Duration>,
    state: Mutex<CacheState<T>>,
}

struct CacheState<T> {
    users: ReferenceCounts,
    entries: HashMap<ObjectKey, TtlCacheEntry<T>>,
}

struct TtlCacheEntry<T> {
    object: Option<Arc<CachedObject<T>>>,
    /// Time of the last successful read; `None` forces a read.
    fresh: Option<Instant>,
    /// Whether it was read since a pod last began to refer to it.
    was_read: bool,
}

impl<T: ObjectKind> TtlCache<T> {
    /// Returns an empty cache.
    pub fn new(api: Arc<dyn ApiClient>, ttl: watch::Receiver<Duration>) -> Self {
        let state = CacheState { users: ReferenceCounts::default(), entries: HashMap::new() };
        Self { api, ttl, state: Mutex::new(state) }
    }

    /// Replaces the pod's references; objects it did not refer to before are read again.
    pub fn register(&self, pod: &PodUid, namespace: &str, names: BTreeSet<String>) {
        let mut state = self.locked();
        let change = state.users.register(pod, namespace, names);
        for key in change.added {
            let entry =
                state.entries.entry(key).or_insert(TtlCacheEntry { object: None, fresh: None, was_read: false });
            (entry.fresh, entry.was_read) = (None, false);
        }
        change.unused.iter().for_each(|key| drop(state.entries.remove(key)));
    }

    /// Removes the pod's references.
    pub fn unregister(&self, pod: &PodUid) {
        let mut state = self.locked();
        for key in state.users.unregister(pod) {
            state.entries.remove(&key);
        }
    }

    /// Returns the object, at most one TTL old unless it is immutable; a stale one if the read fails for another reason
    /// than `NotFound`.
    ///
    /// # Errors
    /// The object is not registered, does not exist, or was never read.
    pub async fn get(&self, namespace: &str, name: &str) -> Result<Arc<CachedObject<T>>, ObjectError> {
        let key = ObjectKey::new(namespace, name);
        let cached = {
            let state = self.locked();
            let Some(entry) = state.entries.get(&key) else {
                return Err(ObjectError::Other(format!("object {namespace:?}/{name:?} not registered")));
            };
            let is_fresh = entry.fresh.is_some_and(|at| at.elapsed() < *self.ttl.borrow());
            match &entry.object {
                Some(object) if is_fresh || (entry.was_read && object.is_immutable()) => return Ok(object.clone()),
                _ => entry.was_read,
            }
        };
        let read = read::<T>(&self.api, (namespace, name), cached).await;
        let mut state = self.locked();
        let mut gone = TtlCacheEntry { object: None, fresh: None, was_read: false };
        // The last reference may have been removed during the read: then nothing is cached.
        let entry = state.entries.get_mut(&key).unwrap_or(&mut gone);
        match read {
            Ok(object) => Ok(entry.take(Arc::new(object))),
            Err(error) if error.is_not_found() => {
                (entry.object, entry.fresh) = (None, None);
                Err(object_error(&error, T::RESOURCE.plural, name))
            }
            Err(error) => entry.object.clone().ok_or_else(|| object_error(&error, T::RESOURCE.plural, name)),
        }
    }

    fn locked(&self) -> MutexGuard<'_, CacheState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> TtlCacheEntry<T> {
    /// Caches the object that was read, unless it is older than the cached one.
    fn take(&mut self, object: Arc<CachedObject<T>>) -> Arc<CachedObject<T>> {
        let kept = match self.object.take().filter(|known| object.is_older(known)) {
            Some(known) => known,
            None => object,
        };
        (self.fresh, self.was_read) = (Some(Instant::now()), true);
        self.object.insert(kept).clone()
    }
}
