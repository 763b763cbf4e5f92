//! Watches the cgroups of running containers for OOM kills that the kernel log does not report.

use std::{
    collections::{HashMap, HashSet},
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use tokio::{
    task::spawn_blocking,
    time::{Instant, sleep_until, timeout},
};
use tracing::{debug, warn};

use super::kill_counters::KillCounters;
use berth_ports::PodObserver;
use berth_stats::{
    PodCgroupPaths,
    mounts::{Mounts, Tree, container_places},
};
use berth_sys::{
    mount_table,
    oom_events::{OomEvent, OomEvents, kills},
};
use berth_types::PodUid;

/// Timeout of finding the cgroups of new containers.
const FIND: Duration = Duration::from_secs(10);
/// Maximum number of watched containers; more than a node's pods have.
const MOST: usize = 10_000;

/// Attempts to find a container's cgroup: a container that has one has it once it runs.
const TRIES: u8 = 3;

/// Delay before the event source is opened again after it failed.
const REOPEN: Duration = Duration::from_secs(60);

/// Container whose cgroup is watched.
struct RunningContainer {
    pod: PodUid,
    id: Arc<str>,
    is_new: bool,
}

/// Event source of the cgroups.
enum EventStream {
    Open(OomEvents),
    /// The source failed; it is opened again at this time.
    Lost(Instant),
}

impl EventStream {
    /// Watches one more cgroup; a no-op while the source is lost.
    fn add(&mut self, group: &Path, id: Arc<str>) -> io::Result<()> {
        match self {
            Self::Open(events) => events.add(group, id),
            Self::Lost(_) => Ok(()),
        }
    }

    fn remove(&mut self, id: &str) {
        if let Self::Open(events) = self {
            events.remove(id);
        }
    }

    /// Waits for the next event; `None` when the source has to be opened again. Cancel-safe.
    async fn next(&mut self) -> Option<io::Result<OomEvent>> {
        match self {
            Self::Open(events) => Some(events.next().await),
            Self::Lost(until) => {
                sleep_until(*until).await;
                None
            }
        }
    }
}

/// Watched container cgroups and their kill counters.
pub(super) struct CgroupWatcher {
    mounts: Arc<Mounts>,
    names: Arc<dyn PodCgroupPaths>,
    observer: Arc<dyn PodObserver>,
    events: EventStream,
    directories: HashMap<Arc<str>, PathBuf>,
    /// Failed attempts to find a container's cgroup.
    tried: HashMap<Arc<str>, u8>,
    counts: KillCounters,
    began: Instant,
    began_at: Timestamp,
}

impl CgroupWatcher {
    /// Opens the event source without watching a cgroup yet; `None` if the kernel does not support it. Containers that
    /// started at or after `began_at` are new.
    pub(super) fn open(
        names: Arc<dyn PodCgroupPaths>,
        observer: Arc<dyn PodObserver>,
        began_at: Timestamp,
    ) -> Option<Self> {
        let mounts = mount_table::read().ok().and_then(|table| Mounts::find(&table))?;
        let events = match OomEvents::new(mounts.is_unified()) {
            Ok(events) => EventStream::Open(events),
            Err(err) => {
                debug!(%err, "OOM kill events of cgroups are not available");
                return None;
            }
        };
        let (mounts, began) = (Arc::new(mounts), Instant::now());
        let (places, tried, counts) = (HashMap::new(), HashMap::new(), KillCounters::default());
        Some(Self { mounts, names, observer, events, directories: places, tried, counts, began, began_at })
    }

    /// Watches exactly the containers that run now.
    pub(super) async fn sync_containers(&mut self) {
        let Some(known) = self.observer.known() else { return };
        let began_at = self.began_at;
        let running: Vec<RunningContainer> = known
            .pods
            .values()
            .flat_map(|pod| {
                pod.running().map(|container| RunningContainer {
                    pod: pod.id.uid.clone(),
                    id: container.id.as_str().into(),
                    is_new: container.started_at.is_some_and(|at| at >= began_at),
                })
            })
            .take(MOST)
            .collect();
        let ids: HashSet<Arc<str>> = running.iter().map(|running| running.id.clone()).collect();
        self.counts.retain(&ids);
        let gone: Vec<Arc<str>> = self.directories.keys().filter(|id| !self.counts.is_watched(id)).cloned().collect();
        for id in gone {
            self.directories.remove(&id);
            self.events.remove(&id);
        }
        self.tried.retain(|id, _| ids.contains(id));
        let is_fresh = |running: &RunningContainer| {
            !self.counts.is_watched(&running.id) && self.tried.get(&running.id).is_none_or(|tries| *tries < TRIES)
        };
        let fresh: Vec<RunningContainer> = running.into_iter().filter(is_fresh).collect();
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
                debug!(containerID = %container.id, %err, "Failed to watch container cgroup for OOM kills");
                continue;
            }
            // Read after the watch is in place, so that no kill is missed in between.
            let Some(count) = kills(&place, self.mounts.is_unified()) else {
                self.events.remove(&container.id);
                continue;
            };
            self.counts.watch(container.id.clone(), count, container.is_new, self.began.elapsed());
            self.directories.insert(container.id, place);
        }
    }

    /// Records a kill that the log reported for a container.
    pub(super) fn record_logged_kill(&mut self, id: &str) {
        self.counts.record_logged_kill(id, self.began.elapsed());
    }

    /// Waits until counters may have to be settled. Cancel-safe.
    pub(super) async fn next(&mut self) {
        let due = self.counts.next_deadline().map(|due| self.began + due);
        let settles = async {
            match due {
                Some(due) => sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = settles => {}
            stir = self.events.next() => match stir {
                Some(Ok(OomEvent::Cgroup(id))) => self.stirs(&id),
                Some(Ok(OomEvent::Overflow)) => self.read_all_counters(),
                Some(Err(err)) => {
                    warn!(%err, "OOM kill event watch of cgroups failed, will retry");
                    self.events = EventStream::Lost(Instant::now() + REOPEN);
                }
                None => self.reopen(),
            },
        }
    }

    /// Opens the event source again; counters contain the kills missed meanwhile.
    fn reopen(&mut self) {
        let mut events = match OomEvents::new(self.mounts.is_unified()) {
            Ok(events) => events,
            Err(err) => {
                debug!(%err, "OOM kill events of cgroups are not available");
                self.events = EventStream::Lost(Instant::now() + REOPEN);
                return;
            }
        };
        for (id, place) in &self.directories {
            if let Err(err) = events.add(place, id.clone()) {
                debug!(containerID = %id, %err, "Failed to watch container cgroup for OOM kills");
            }
        }
        self.events = EventStream::Open(events);
        self.read_all_counters();
    }

    fn stirs(&mut self, id: &str) {
        if self.counts.record_event(id, self.began.elapsed()) {
            self.read_counter(id, !self.mounts.is_unified());
        }
    }

    /// Reads the OOM kill counters of all watched containers, because events may have been lost.
    fn read_all_counters(&mut self) {
        let all: Vec<Arc<str>> = self.directories.keys().cloned().collect();
        all.iter().for_each(|id| self.read_counter(id, false));
    }

    /// Settles due counters; returns containers with kills that the log did not report, and their number.
    pub(super) fn settle(&mut self) -> Vec<(Arc<str>, u64)> {
        for id in self.counts.due_reads(self.began.elapsed()) {
            self.read_counter(&id, !self.mounts.is_unified());
        }
        let due = self.counts.due_settlements(self.began.elapsed());
        due.iter().for_each(|id| self.read_counter(id, false));
        due.into_iter().map(|id| (self.counts.settle(&id), id)).filter(|(n, _)| *n > 0).map(|(n, id)| (id, n)).collect()
    }

    /// Reads a container's counter. `is_ahead`: cgroup v1 notifies before it kills.
    fn read_counter(&mut self, id: &str, is_ahead: bool) {
        let count = self.directories.get(id).and_then(|place| kills(place, self.mounts.is_unified()));
        self.counts.record_count(id, count, is_ahead, self.began.elapsed());
    }
}

/// Finds the cgroup directories of containers; those without one are left out.
fn find(
    mounts: &Mounts,
    names: &dyn PodCgroupPaths,
    containers: Vec<RunningContainer>,
) -> Vec<(RunningContainer, PathBuf)> {
    let place = |container: &RunningContainer| {
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
    use crate::node::oom::tests::NoPods;

    impl CgroupWatcher {
        /// Watches the containers `a`, `b`, and `c`, whose counters are 0.
        pub(in crate::node::oom) fn listening(root: &Path) -> Self {
            let (places, tried, counts) = (HashMap::new(), HashMap::new(), KillCounters::default());
            let events = EventStream::Open(OomEvents::new(true).expect("watched"));
            let mounts = Arc::new(Mounts::Unified(root.to_owned()));
            let (names, observer) = (Arc::new(Names), Arc::new(NoPods));
            let (began, began_at) = (Instant::now(), Timestamp::UNIX_EPOCH);
            let mut groups =
                Self { mounts, names, observer, events, directories: places, tried, counts, began, began_at };
            for name in ["a", "b", "c"] {
                let (id, place): (Arc<str>, _) = (name.into(), root.join(name));
                std::fs::create_dir(&place).expect("made");
                count(root, name, 0);
                groups.events.add(&place, id.clone()).expect("watched");
                groups.counts.watch(id.clone(), kills(&place, true).expect("counted"), true, Duration::ZERO);
                groups.directories.insert(id, place);
            }
            groups
        }
    }

    fn count(root: &Path, id: &str, kills: u64) {
        let text = format!("oom_kill {kills}\noom_group_kill 0\n");
        std::fs::write(root.join(id).join("memory.events"), text).expect("written");
    }

    /// First non-empty settlement.
    async fn settled(groups: &mut CgroupWatcher) -> Vec<(Arc<str>, u64)> {
        let settling = async {
            loop {
                let kills = groups.settle();
                if !kills.is_empty() {
                    return kills;
                }
                groups.next().await;
            }
        };
        timeout(Duration::from_secs(60), settling).await.expect("received in time")
    }

    #[tokio::test]
    async fn kills_lost_in_an_inotify_queue_overflow_are_counted() {
        let test = "kills_lost_in_an_inotify_queue_overflow_are_counted";
        let kept = std::fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap_or_default();
        let Some(kept) = kept.trim().parse::<u64>().ok().filter(|kept| *kept <= 100_000) else {
            println!("skipped: {test}: the kernel keeps more events than a test should make");
            return;
        };
        let root = tempfile::tempdir().expect("a folder");
        let mut groups = CgroupWatcher::listening(root.path());
        // The same event again, for one file, would be coalesced.
        for _ in 0..=kept / 2 {
            ["a", "b"].iter().for_each(|id| count(root.path(), id, 0));
        }
        count(root.path(), "c", 1);
        assert_eq!(settled(&mut groups).await, [(Arc::<str>::from("c"), 1)]);
        count(root.path(), "b", 2);
        assert_eq!(settled(&mut groups).await, [(Arc::<str>::from("b"), 2)], "and it goes on");
    }

    #[tokio::test]
    async fn a_lost_event_stream_is_reopened() {
        let root = tempfile::tempdir().expect("a folder");
        let mut groups = CgroupWatcher::listening(root.path());
        groups.events = EventStream::Lost(Instant::now());
        count(root.path(), "a", 1);
        assert_eq!(settled(&mut groups).await, [(Arc::<str>::from("a"), 1)], "what happened meanwhile is counted");
        count(root.path(), "b", 2);
        assert_eq!(settled(&mut groups).await, [(Arc::<str>::from("b"), 2)], "later events are received");
        assert!(matches!(groups.events, EventStream::Open(_)));
    }

    struct Names;

    impl PodCgroupPaths for Names {
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
        let running = |pod: &str, id: &str| RunningContainer { pod: pod.into(), id: id.into(), is_new: true };
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
