//! What is known of the objects of one watch, as others read it.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::watch;

/// Objects by (namespace, name), as of one moment. Never empty because of an outage: what was known
/// stays (spec 10 §3.2).
#[derive(Debug)]
pub struct Snapshot<T> {
    /// Whether a full set was seen at least once.
    pub synced: bool,
    /// Resource version of the newest event.
    pub version: String,
    /// The objects.
    pub objects: BTreeMap<(String, String), Arc<T>>,
}

impl<T> Default for Snapshot<T> {
    fn default() -> Self {
        Self { synced: false, version: String::new(), objects: BTreeMap::new() }
    }
}

// Not derived: the objects are shared, whatever they are.
impl<T> Clone for Snapshot<T> {
    fn clone(&self) -> Self {
        Self { synced: self.synced, version: self.version.clone(), objects: self.objects.clone() }
    }
}

impl<T> Snapshot<T> {
    /// One object.
    pub fn get(&self, namespace: &str, name: &str) -> Option<&Arc<T>> {
        self.objects.get(&(namespace.to_owned(), name.to_owned()))
    }
}

/// Reads what a reflector keeps. Cheap to clone.
#[derive(Debug)]
pub struct Store<T> {
    snapshots: watch::Receiver<Arc<Snapshot<T>>>,
}

impl<T> Clone for Store<T> {
    fn clone(&self) -> Self {
        Self { snapshots: self.snapshots.clone() }
    }
}

impl<T> Store<T> {
    /// Reads what is sent there.
    pub fn new(snapshots: watch::Receiver<Arc<Snapshot<T>>>) -> Self {
        Self { snapshots }
    }

    /// What is known now.
    pub fn snapshot(&self) -> Arc<Snapshot<T>> {
        self.snapshots.borrow().clone()
    }

    /// One object.
    pub fn get(&self, namespace: &str, name: &str) -> Option<Arc<T>> {
        self.snapshot().get(namespace, name).cloned()
    }

    /// Waits for the first full set. Never returns where the reflector ended before it.
    pub async fn synced(&mut self) {
        if self.snapshots.wait_for(|snapshot| snapshot.synced).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Waits for the next change and takes it as seen. Never returns once the reflector ended.
    pub async fn changed(&mut self) {
        if self.snapshots.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
