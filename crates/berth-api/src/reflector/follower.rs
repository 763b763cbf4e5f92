//! Consumer interface of reflectors, and [`Snapshots`], which publishes all objects of a selection.

use std::{collections::BTreeMap, future::Future, ops::ControlFlow, sync::Arc};

use tokio::sync::{Notify, watch};
use tracing::debug;

use super::{
    Selection,
    event::{Key, ReflectedObject},
};
use crate::store::Snapshot;

/// Consumer of a reflector. `ControlFlow::Break` ends the reflector.
pub trait Follower: Send + Sync + 'static {
    /// Object type.
    type Object: ReflectedObject;
    /// Accumulator of the initial objects until the set is complete.
    type All: Default + Send + 'static;

    /// Selection to list and watch; constant.
    fn selection(&self) -> Selection;

    /// Adds an object to the initial set; `None`: it was deleted meanwhile.
    fn gather(&self, all: &mut Self::All, key: Key, object: Option<Self::Object>);

    /// The initial set is complete, as of that version.
    fn replace(&mut self, all: Self::All, version: &str) -> ControlFlow<()>;

    /// One object was changed; `None`: it was deleted. `version` is the version of the whole set.
    fn change(&mut self, key: Key, object: Option<Self::Object>, version: &str) -> ControlFlow<()>;

    /// Resolves when a caller needs an object now: ends a back-off, because a refusal may no longer apply.
    fn nudged(&self) -> impl Future<Output = ()> + Send;
}

type Objects<T> = BTreeMap<Key, Arc<T>>;

/// Follower that publishes all objects as snapshots.
pub struct Snapshots<T> {
    selection: Selection,
    snapshots: watch::Sender<Arc<Snapshot<T>>>,
    nudge: Arc<Notify>,
}

impl<T: ReflectedObject> Snapshots<T> {
    /// Returns a follower that publishes to `snapshots`.
    pub fn new(selection: Selection, snapshots: watch::Sender<Arc<Snapshot<T>>>, nudge: Arc<Notify>) -> Self {
        Self { selection, snapshots, nudge }
    }
}

impl<T: ReflectedObject> Follower for Snapshots<T> {
    type Object = T;
    type All = Objects<T>;

    fn selection(&self) -> Selection {
        self.selection.clone()
    }

    fn gather(&self, all: &mut Objects<T>, key: Key, object: Option<T>) {
        match object {
            Some(object) => all.insert(key, Arc::new(object)),
            None => all.remove(&key),
        };
    }

    /// Unchanged objects keep their `Arc`, so that consumers can compare pointers.
    fn replace(&mut self, mut objects: Objects<T>, version: &str) -> ControlFlow<()> {
        let known = self.snapshots.borrow().clone();
        let mut changed = !known.synced || known.objects.len() != objects.len();
        for (key, object) in &mut objects {
            let older = known.objects.get(key);
            match older.filter(|old| is_same(old.as_ref(), object.as_ref())) {
                Some(old) => *object = old.clone(),
                None => {
                    if let (Some(older), Some(own)) = (older, Arc::get_mut(object)) {
                        own.share(older);
                    }
                    changed = true;
                }
            }
        }
        drop(known);
        debug!(resource = self.selection.resource().plural, count = objects.len(), version, "Caches populated");
        let snapshot = Arc::new(Snapshot { synced: true, version: version.to_owned(), objects });
        self.snapshots.send_if_modified(|known| {
            *known = snapshot;
            changed
        });
        ControlFlow::Continue(())
    }

    fn change(&mut self, key: Key, object: Option<T>, version: &str) -> ControlFlow<()> {
        // Copies the map only while a reader has the last snapshot.
        self.snapshots.send_modify(|snapshot| {
            let snapshot = Arc::make_mut(snapshot);
            version.clone_into(&mut snapshot.version);
            match object {
                Some(mut object) => {
                    if let Some(older) = snapshot.objects.get(&key) {
                        object.share(older);
                    }
                    snapshot.objects.insert(key, Arc::new(object))
                }
                None => snapshot.objects.remove(&key),
            };
        });
        ControlFlow::Continue(())
    }

    async fn nudged(&self) {
        self.nudge.notified().await;
    }
}

fn is_same<T: ReflectedObject>(old: &T, new: &T) -> bool {
    let (old, new) = (old.meta(), new.meta());
    old.resource_version.is_some() && old.resource_version == new.resource_version && old.uid == new.uid
}
