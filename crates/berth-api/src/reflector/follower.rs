//! Who takes what a reflector reads: the seam between asking and keeping. [`Snapshots`] keeps all objects of a
//! selection for whoever reads a store.

use std::{collections::BTreeMap, future::Future, ops::ControlFlow, sync::Arc};

use tokio::sync::{Notify, watch};
use tracing::debug;

use super::{
    Selection,
    event::{Kept, Key},
};
use crate::store::Snapshot;

/// Follows objects. `Break` says that there is nothing more to follow.
pub trait Follower: Send + Sync + 'static {
    /// What is followed.
    type Object: Kept;
    /// What there is, until all of it is there.
    type All: Default + Send + 'static;

    /// What is asked for; always the same.
    fn selection(&self) -> Selection;

    /// Adds an object to what there is; `None`: it is gone meanwhile.
    fn gather(&self, all: &mut Self::All, key: Key, object: Option<Self::Object>);

    /// That is all there is, as of that version.
    fn replace(&mut self, all: Self::All, version: &str) -> ControlFlow<()>;

    /// One object is like this now; `None`: it is gone. All there is, is as of that version.
    fn change(&mut self, key: Key, object: Option<Self::Object>, version: &str) -> ControlFlow<()>;

    /// Somebody wants it now: a wait ends at once, for a refusal may be no longer true.
    fn nudged(&self) -> impl Future<Output = ()> + Send;
}

type Objects<T> = BTreeMap<Key, Arc<T>>;

/// Keeps all objects, for whoever reads them.
pub struct Snapshots<T> {
    selection: Selection,
    snapshots: watch::Sender<Arc<Snapshot<T>>>,
    nudge: Arc<Notify>,
}

impl<T: Kept> Snapshots<T> {
    /// What is selected goes there.
    pub fn new(selection: Selection, snapshots: watch::Sender<Arc<Snapshot<T>>>, nudge: Arc<Notify>) -> Self {
        Self { selection, snapshots, nudge }
    }
}

impl<T: Kept> Follower for Snapshots<T> {
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

    /// Objects that are the same stay the same, so that whoever compares sees it.
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
        // The map is copied only while somebody holds the last one.
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

fn is_same<T: Kept>(old: &T, new: &T) -> bool {
    let (old, new) = (old.meta(), new.meta());
    old.resource_version.is_some() && old.resource_version == new.resource_version && old.uid == new.uid
}
