//! OOM kill notifications and counters of cgroups, v1 and v2.
//!
//! cgroup v2: `memory.events`, watched by one inotify instance for all cgroups. cgroup v1: `memory.oom_control`, with
//! one eventfd per cgroup. An event is a hint, the counter in the cgroup's file is the truth: cgroup v1 notifies
//! *before* it kills, also if an ancestor has reached its memory limit.
//! Implements spec 05 §8.

use std::{collections::HashMap, io, path::Path, pin::Pin, sync::Arc};

use futures::{
    Stream, StreamExt,
    stream::{SelectAll, unfold},
};
use inotify::{EventMask, EventStream, Inotify, WatchDescriptor, WatchMask, Watches};

use super::memory_events::CgroupEventFd;

/// Event counters of a cgroup and its descendants (cgroup v2).
const UNIFIED: &str = "memory.events";
/// OOM state and kill counter of one cgroup (cgroup v1).
const OLD: &str = "memory.oom_control";
/// Kill counter in both files.
const KILLS: &str = "oom_kill ";
/// Group kill counter in `memory.events`; absent in kernels before 5.17.
const WHOLE: &str = "oom_group_kill ";
/// Whether an OOM kill kills the whole cgroup.
const AS_ONE: &str = "memory.oom.group";
/// Size of the event buffer, bytes.
const EVENTS: usize = 4096;

/// Watcher of many cgroups, each identified by a name.
pub struct OomEvents(OomEventSource);

/// Which cgroups an event concerns.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum OomEvent {
    /// The cgroup of that name.
    Cgroup(Arc<str>),
    /// Any cgroup: the kernel's event queue overflowed.
    Overflow,
}

enum OomEventSource {
    Unified {
        watches: Watches,
        events: EventStream<Vec<u8>>,
        names: HashMap<WatchDescriptor, Arc<str>>,
        watched: HashMap<Arc<str>, WatchDescriptor>,
    },
    Old(SelectAll<Pin<Box<dyn Stream<Item = Arc<str>> + Send>>>),
}

impl OomEvents {
    /// Creates a watcher without cgroups. Must be called within a runtime.
    ///
    /// # Errors
    /// If no inotify instance can be created.
    pub fn new(is_unified: bool) -> io::Result<Self> {
        if !is_unified {
            return Ok(Self(OomEventSource::Old(SelectAll::new())));
        }
        let inotify = Inotify::init()?;
        let watches = inotify.watches();
        let events = inotify.into_event_stream(vec![0; EVENTS])?;
        Ok(Self(OomEventSource::Unified { watches, events, names: HashMap::new(), watched: HashMap::new() }))
    }

    /// Watches the cgroup of that directory until [`OomEvents::remove`]: the kernel does not report its removal.
    ///
    /// # Errors
    /// If the cgroup does not exist, or the kernel refuses the watch.
    pub fn add(&mut self, group: &Path, name: Arc<str>) -> io::Result<()> {
        match &mut self.0 {
            OomEventSource::Unified { watches, names, watched, .. } => {
                let watch = watches.add(group.join(UNIFIED), WatchMask::MODIFY)?;
                watched.insert(name.clone(), watch.clone());
                names.insert(watch, name);
            }
            OomEventSource::Old(all) => {
                // Kernels before 4.13 do not count: their notifications carry no information and cannot be cancelled.
                if kills(group, false).is_none() {
                    return Err(io::ErrorKind::Unsupported.into());
                }
                let counter = CgroupEventFd::of(group, OLD, "")?;
                let group = group.to_owned();
                all.push(Box::pin(unfold((counter, group, name), |(counter, group, name)| async move {
                    counter.next().await.ok()?;
                    group.exists().then(|| (name.clone(), (counter, group, name)))
                })));
            }
        }
        Ok(())
    }

    /// Stops watching a cgroup. On cgroup v1 the kernel itself reports the removal of a cgroup.
    pub fn remove(&mut self, name: &str) {
        if let OomEventSource::Unified { watches, names, watched, .. } = &mut self.0
            && let Some(watch) = watched.remove(name)
        {
            names.remove(&watch);
            let _ = watches.remove(watch); // the kernel may have removed it with the cgroup
        }
    }

    /// Waits for the next event; pending forever if nothing is watched. Cancel-safe.
    ///
    /// # Errors
    /// If the inotify descriptor fails.
    pub async fn next(&mut self) -> io::Result<OomEvent> {
        match &mut self.0 {
            OomEventSource::Unified { events, names, watched, .. } => loop {
                let event = events.next().await.ok_or(io::ErrorKind::UnexpectedEof)??;
                if event.mask.contains(EventMask::Q_OVERFLOW) {
                    return Ok(OomEvent::Overflow);
                }
                if event.mask.contains(EventMask::IGNORED) {
                    if let Some(name) = names.remove(&event.wd) {
                        watched.remove(&name);
                    }
                } else if let Some(name) = names.get(&event.wd) {
                    return Ok(OomEvent::Cgroup(name.clone()));
                }
            },
            OomEventSource::Old(all) => match all.next().await {
                Some(name) => Ok(OomEvent::Cgroup(name)),
                None => std::future::pending().await,
            },
        }
    }
}

/// OOM kills in a cgroup since its creation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OomKills {
    /// Killed processes.
    pub processes: u64,
    /// Kills of the whole cgroup at once.
    pub groups: u64,
}

/// Reads the OOM kills of the cgroup of that directory; `None` if it is gone, or the kernel does not count.
pub fn kills(group: &Path, is_unified: bool) -> Option<OomKills> {
    let text = std::fs::read_to_string(group.join(if is_unified { UNIFIED } else { OLD })).ok()?;
    let number =
        |name: &str| -> Option<u64> { text.lines().find_map(|line| line.strip_prefix(name))?.trim().parse().ok() };
    let processes = number(KILLS)?;
    let ends_as_one = || std::fs::read_to_string(group.join(AS_ONE)).is_ok_and(|text| text.trim() == "1");
    // Kernels without the counter: the whole cgroup was killed at most once, since nothing is left to be killed again.
    let groups = number(WHOLE).unwrap_or_else(|| u64::from(is_unified && processes > 0 && ends_as_one()));
    Some(OomKills { processes, groups })
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Write, process::Command, time::Duration};

    use tokio::time::timeout;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    async fn next_event(events: &mut OomEvents) -> OomEvent {
        timeout(PATIENCE, events.next()).await.expect("in time").expect("received")
    }

    #[tokio::test]
    async fn an_overflow_of_the_kernel_queue_is_reported() {
        let test = "an_overflow_of_the_kernel_queue_is_reported";
        let kept = fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap_or_default();
        let Some(kept) = kept.trim().parse::<usize>().ok().filter(|kept| *kept <= 100_000) else {
            println!("skipped: {test}: the kernel keeps more events than a test should make");
            return;
        };
        let root = tempfile::tempdir().expect("a folder");
        let mut events = OomEvents::new(true).expect("watched");
        let [mut a, mut b] = ["a", "b"].map(|name| {
            let group = root.path().join(name);
            fs::create_dir(&group).expect("made");
            let file = fs::File::create(group.join(UNIFIED)).expect("made");
            events.add(&group, name.into()).expect("watched");
            file
        });
        // Consecutive events of one file would be merged into one.
        for _ in 0..=kept / 2 {
            a.write_all(b"x").expect("written");
            b.write_all(b"x").expect("written");
        }
        let mut received = 0;
        while next_event(&mut events).await != OomEvent::Overflow {
            received += 1;
        }
        assert!(received <= kept, "{received}");
        a.write_all(b"x").expect("written");
        assert_eq!(next_event(&mut events).await, OomEvent::Cgroup("a".into()), "and it goes on");
    }

    #[tokio::test]
    async fn cgroups_are_watched_until_they_are_removed() {
        let root = tempfile::tempdir().expect("a folder");
        let groups = ["a", "b"].map(|name| root.path().join(name));
        let mut events = OomEvents::new(true).expect("watched");
        for group in &groups {
            fs::create_dir(group).expect("made");
            assert!(events.add(group, "x".into()).is_err(), "no such file");
            fs::write(group.join(UNIFIED), "oom 0\noom_kill 0\noom_group_kill 0\n").expect("written");
            let name = group.file_name().expect("it has one").to_string_lossy().into_owned();
            events.add(group, name.into()).expect("watched");
        }
        fs::write(groups[1].join(UNIFIED), "oom 1\noom_kill 2\noom_group_kill 1\n").expect("written");
        assert_eq!(next_event(&mut events).await, OomEvent::Cgroup("b".into()));
        assert_eq!(kills(&groups[0], true), Some(OomKills::default()));
        assert_eq!(kills(&groups[1], true), Some(OomKills { processes: 2, groups: 1 }));
        fs::remove_file(groups[0].join(UNIFIED)).expect("removed");
        assert_eq!(kills(&groups[0], true), None);
        let gone = async {
            loop {
                if let OomEventSource::Unified { names, .. } = &events.0
                    && names.len() == 1
                {
                    return;
                }
                let _ = timeout(Duration::from_millis(10), events.next()).await; // it does not end by itself
            }
        };
        timeout(PATIENCE, gone).await.expect("what is gone is forgotten");
    }

    /// Number of watches by descriptor and by name.
    fn watches(events: &OomEvents) -> (usize, usize) {
        match &events.0 {
            OomEventSource::Unified { names, watched, .. } => (names.len(), watched.len()),
            OomEventSource::Old(_) => (0, 0),
        }
    }

    #[tokio::test]
    async fn nothing_is_kept_of_a_group_that_is_removed() {
        // As for a removed cgroup, no event arrives when the file is unlinked: another name keeps it alive.
        let root = tempfile::tempdir().expect("a folder");
        let file = root.path().join(UNIFIED);
        let mut events = OomEvents::new(true).expect("watched");
        for round in 0..3 {
            fs::write(&file, "oom_kill 0\n").expect("written");
            fs::hard_link(&file, root.path().join(format!("kept-{round}"))).expect("linked");
            events.add(root.path(), "c".into()).expect("watched");
            assert_eq!(watches(&events), (1, 1));
            fs::remove_file(&file).expect("removed");
            events.remove("c");
            events.remove("c");
            assert_eq!(watches(&events), (0, 0));
        }
        fs::write(root.path().join("kept-0"), "oom_kill 1\n").expect("written");
        fs::write(&file, "oom_kill 0\n").expect("written");
        events.add(root.path(), "d".into()).expect("watched");
        fs::write(&file, "oom_kill 1\n").expect("written");
        assert_eq!(next_event(&mut events).await, OomEvent::Cgroup("d".into()), "no other notification");
    }

    #[test]
    fn garbage_counts_nothing() {
        let root = tempfile::tempdir().expect("a folder");
        for garbage in ["", "oom_kill", "oom_kill x\n", "oom_kill -1\n", "oom_kill 99999999999999999999999\n", "\0\0"] {
            fs::write(root.path().join(OLD), garbage).expect("written");
            assert_eq!(kills(root.path(), false), None, "{garbage:?}");
        }
        fs::write(root.path().join(OLD), "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n").expect("written");
        assert_eq!(kills(root.path(), false), Some(OomKills { processes: 7, groups: 0 }));
    }

    #[tokio::test]
    async fn a_kernel_that_does_not_count_is_not_listened_to() {
        let root = tempfile::tempdir().expect("a folder");
        fs::write(root.path().join("cgroup.event_control"), "").expect("written");
        fs::write(root.path().join(OLD), "oom_kill_disable 0\nunder_oom 0\n").expect("written");
        let mut events = OomEvents::new(false).expect("nothing yet");
        let counters = |events: &OomEvents| match &events.0 {
            OomEventSource::Old(all) => all.len(),
            OomEventSource::Unified { .. } => 0,
        };
        for _ in 0..3 {
            assert!(events.add(root.path(), "c".into()).is_err());
        }
        assert_eq!(counters(&events), 0);
        fs::write(root.path().join(OLD), "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n").expect("written");
        events.add(root.path(), "c".into()).expect("counted");
        assert_eq!(counters(&events), 1);
    }

    #[test]
    fn a_group_that_ends_as_one_was_killed_once() {
        let root = tempfile::tempdir().expect("a folder");
        for (as_one, text, expected) in [
            ("1\n", "oom_kill 4\n", (4, 1)),
            ("1\n", "oom_kill 0\n", (0, 0)),
            ("0\n", "oom_kill 4\n", (4, 0)),
            ("1\n", "oom_kill 4\noom_group_kill 0\n", (4, 0)),
            ("1\n", "oom_kill 8\noom_group_kill 2\n", (8, 2)),
        ] {
            fs::write(root.path().join(AS_ONE), as_one).expect("written");
            fs::write(root.path().join(UNIFIED), text).expect("written");
            let found = kills(root.path(), true).expect("received");
            assert_eq!((found.processes, found.groups), expected, "{as_one:?} {text:?}");
        }
    }

    #[tokio::test]
    async fn a_killed_child_is_reported_on_cgroup_v1() {
        let test = "a_killed_child_is_reported_on_cgroup_v1";
        let group = Path::new("/sys/fs/cgroup/memory").join(format!("berth-oom-{}", std::process::id()));
        if fs::create_dir(&group).is_err() || fs::write(group.join("memory.limit_in_bytes"), "8388608").is_err() {
            println!("skipped: {test}: needs root and the old hierarchy of memory");
            return;
        }
        let _ = fs::write(group.join("memory.memsw.limit_in_bytes"), "8388608"); // without swap there is no such file
        let mut events = OomEvents::new(false).expect("nothing to refuse");
        events.add(&group, "c".into()).expect("counted");
        let before = kills(&group, false);
        // The shell survives: the killed process is a child.
        let eats = "head -c 67108864 /dev/zero | tail -c 67108864 | wc -c";
        let script = format!("echo $$ > {}/cgroup.procs; {eats}; exit 0", group.display());
        let shell = tokio::task::spawn_blocking(move || Command::new("sh").arg("-c").arg(script).output());
        let event = timeout(PATIENCE, events.next()).await;
        let ended = timeout(PATIENCE, shell).await;
        let after = kills(&group, false);
        drop(events);
        for _ in 0..1000 {
            if fs::remove_dir(&group).is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(event.expect("in time").expect("received"), OomEvent::Cgroup("c".into()));
        ended.expect("in time").expect("no panic").expect("a shell");
        assert_eq!(before.zip(after).map(|(b, a)| (b.processes, a.processes)), Some((0, 1)));
    }
}
