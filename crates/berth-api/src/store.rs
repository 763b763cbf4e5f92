//! Read access to a reflector's cache: snapshots and change notifications.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::watch;

/// Objects by (namespace, name) at one moment. An outage never empties it: the last known objects stay (spec 10 §3.2).
#[derive(Debug)]
pub struct Snapshot<T> {
    /// Whether the set was complete at least once.
    pub synced: bool,
    /// Resource version of the newest event.
    pub version: String,
    /// Objects by namespace and name.
    pub objects: BTreeMap<(String, String), Arc<T>>,
}

impl<T> Default for Snapshot<T> {
    fn default() -> Self {
        Self { synced: false, version: String::new(), objects: BTreeMap::new() }
    }
}

// Not derived: `T` need not be `Clone`, because the objects are shared.
impl<T> Clone for Snapshot<T> {
    fn clone(&self) -> Self {
        Self { synced: self.synced, version: self.version.clone(), objects: self.objects.clone() }
    }
}

impl<T> Snapshot<T> {
    /// Returns one object.
    pub fn get(&self, namespace: &str, name: &str) -> Option<&Arc<T>> {
        self.objects.get(&(namespace.to_owned(), name.to_owned()))
    }
}

/// Reader of a reflector's cache. Cheap to clone.
#[derive(Debug)]
pub struct ReflectorStore<T> {
    snapshots: watch::Receiver<Arc<Snapshot<T>>>,
}

impl<T> Clone for ReflectorStore<T> {
    fn clone(&self) -> Self {
        Self { snapshots: self.snapshots.clone() }
    }
}

impl<T> ReflectorStore<T> {
    /// Returns a reader of the snapshots sent to this channel.
    pub fn new(snapshots: watch::Receiver<Arc<Snapshot<T>>>) -> Self {
        Self { snapshots }
    }

    /// Latest snapshot.
    pub fn snapshot(&self) -> Arc<Snapshot<T>> {
        self.snapshots.borrow().clone()
    }

    /// Returns one object of the latest snapshot.
    pub fn get(&self, namespace: &str, name: &str) -> Option<Arc<T>> {
        self.snapshot().get(namespace, name).cloned()
    }

    /// Waits for the first sync. Never returns if the reflector ends before.
    pub async fn synced(&mut self) {
        if self.snapshots.wait_for(|snapshot| snapshot.synced).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Waits for the next change and marks it as observed. Never returns once the reflector has ended.
    pub async fn changed(&mut self) {
        if self.snapshots.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
