//! Listens to the groups of containers that run, for kills that the kernel's log does not tell of.

use std::{
    collections::{HashMap, HashSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use tokio::{
    task::spawn_blocking,
    time::{Instant, sleep_until, timeout},
};
use tracing::debug;

use crate::{
    engine::ports::PodObserver,
    node::oom_counts::Counts,
    pod::PodUid,
    stats::{
        PodGroups,
        mounts::{Mounts, Tree, container_places},
    },
    sys::{
        mount_table,
        oom_events::{OomEvents, kills},
    },
};

/// How long it may take to find groups.
const FIND: Duration = Duration::from_secs(10);
/// Containers whose groups are listened to, at most; those of more pods than a node has.
const MOST: usize = 10_000;

/// How often the group of a container is looked for: one with a group has it when it runs.
const TRIES: u8 = 3;

/// A container that runs.
struct Running {
    pod: PodUid,
    id: Arc<str>,
    is_new: bool,
}

/// See the file's documentation.
pub(super) struct Groups {
    mounts: Arc<Mounts>,
    names: Arc<dyn PodGroups>,
    observer: Arc<dyn PodObserver>,
    events: OomEvents,
    places: HashMap<Arc<str>, PathBuf>,
    /// How often groups were looked for that were not there.
    tried: HashMap<Arc<str>, u8>,
    counts: Counts,
    began: Instant,
    began_at: Timestamp,
}

impl Groups {
    /// Listens to none yet; `None` where the kernel does not tell. Containers that begin from `began_at` on are new.
    pub(super) fn open(names: Arc<dyn PodGroups>, observer: Arc<dyn PodObserver>, began_at: Timestamp) -> Option<Self> {
        let mounts = mount_table::read().ok().and_then(|table| Mounts::find(&table))?;
        let events = match OomEvents::new(mounts.is_unified()) {
            Ok(events) => events,
            Err(err) => {
                debug!(%err, "The kernel does not tell what it kills in groups");
                return None;
            }
        };
        let (mounts, began) = (Arc::new(mounts), Instant::now());
        let (places, tried, counts) = (HashMap::new(), HashMap::new(), Counts::default());
        Some(Self { mounts, names, observer, events, places, tried, counts, began, began_at })
    }

    /// Listens to what runs now, and to nothing else.
    pub(super) async fn follow(&mut self) {
        let Some(known) = self.observer.known() else { return };
        let began_at = self.began_at;
        let running: Vec<Running> = known
            .pods
            .values()
            .flat_map(|pod| {
                pod.running().map(|container| Running {
                    pod: pod.id.uid.clone(),
                    id: container.id.as_str().into(),
                    is_new: container.started_at.is_some_and(|at| at >= began_at),
                })
            })
            .take(MOST)
            .collect();
        let ids: HashSet<Arc<str>> = running.iter().map(|running| running.id.clone()).collect();
        self.counts.retain(&ids);
        let gone: Vec<Arc<str>> = self.places.keys().filter(|id| !self.counts.is_watched(id)).cloned().collect();
        for id in gone {
            self.places.remove(&id);
            self.events.remove(&id);
        }
        self.tried.retain(|id, _| ids.contains(id));
        let is_fresh = |running: &Running| {
            !self.counts.is_watched(&running.id) && self.tried.get(&running.id).is_none_or(|tries| *tries < TRIES)
        };
        let fresh: Vec<Running> = running.into_iter().filter(is_fresh).collect();
        if fresh.is_empty() {
            return;
        }
        for container in &fresh {
            *self.tried.entry(container.id.clone()).or_default() += 1;
        }
        let (mounts, names) = (self.mounts.clone(), self.names.clone());
        let found = timeout(FIND, spawn_blocking(move || find(&mounts, &*names, fresh))).await;
        for (container, place) in found.ok().and_then(Result::ok).unwrap_or_default() {
            if let Err(err) = self.events.add(&place, container.id.clone()) {
                debug!(containerID = %container.id, %err, "The kernel does not tell what it kills in a container");
                continue;
            }
            // Read when it is listened to: nothing falls between.
            let Some(count) = kills(&place, self.mounts.is_unified()) else {
                self.events.remove(&container.id);
                continue;
            };
            self.counts.watch(container.id.clone(), count, container.is_new, self.began.elapsed());
            self.places.insert(container.id, place);
        }
    }

    /// The log told of a kill in that container.
    pub(super) fn heard(&mut self, id: &str) {
        self.counts.heard(id, self.began.elapsed());
    }

    /// Waits until there may be something to tell. Safe to drop.
    pub(super) async fn next(&mut self) {
        let due = self.counts.due().map(|due| self.began + due);
        let settles = async {
            match due {
                Some(due) => sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = settles => {}
            id = self.events.next() => if self.counts.stirs(&id, self.began.elapsed()) {
                self.look(&id, !self.mounts.is_unified());
            },
        }
    }

    /// Containers in which processes were killed that the log did not tell of, and how many.
    pub(super) fn settle(&mut self) -> Vec<(Arc<str>, u64)> {
        for id in self.counts.stirred(self.began.elapsed()) {
            self.look(&id, !self.mounts.is_unified());
        }
        let due = self.counts.due_now(self.began.elapsed());
        due.iter().for_each(|id| self.look(id, false));
        due.into_iter().map(|id| (self.counts.settle(&id), id)).filter(|(n, _)| *n > 0).map(|(n, id)| (id, n)).collect()
    }

    /// The old hierarchy tells ahead of what it does.
    fn look(&mut self, id: &str, is_ahead: bool) {
        let count = self.places.get(id).and_then(|place| kills(place, self.mounts.is_unified()));
        self.counts.counted(id, count, is_ahead, self.began.elapsed());
    }
}

/// The directories of those that have one.
fn find(mounts: &Mounts, names: &dyn PodGroups, containers: Vec<Running>) -> Vec<(Running, PathBuf)> {
    let place = |container: &Running| {
        let pods = names.of_pod(&container.pod);
        let mut places = pods.iter().flat_map(|pod| container_places(pod, &container.id));
        places.find_map(|group| mounts.directory(&group, Tree::Memory).filter(|directory| directory.is_dir()))
    };
    containers
        .into_iter()
        .filter_map(|container| Some((place(&container)?, container)))
        .map(|(at, c)| (c, at))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Names;

    impl PodGroups for Names {
        fn above(&self) -> Vec<String> {
            Vec::new()
        }
        fn of_pod(&self, pod: &PodUid) -> Vec<String> {
            vec![format!("/guaranteed/{}", pod.as_str()), format!("/burstable/{}", pod.as_str())]
        }
    }

    #[test]
    fn groups_are_found_by_any_name_in_any_class() {
        let root = tempfile::tempdir().expect("a folder");
        for group in ["burstable/p/a", "guaranteed/q/cri-containerd-b.scope"] {
            std::fs::create_dir_all(root.path().join(group)).expect("made");
        }
        let mounts = Mounts::Unified(root.path().to_owned());
        let running = |pod: &str, id: &str| Running { pod: pod.into(), id: id.into(), is_new: true };
        let found = find(&mounts, &Names, vec![running("p", "a"), running("q", "b"), running("p", "c")]);
        let shown: Vec<_> =
            found.iter().map(|(c, at)| (&*c.id, at.strip_prefix(root.path()).expect("below"))).collect();
        assert_eq!(
            shown,
            [
                ("a", std::path::Path::new("burstable/p/a")),
                ("b", std::path::Path::new("guaranteed/q/cri-containerd-b.scope"))
            ]
        );
    }
}
