//! The kernel's word that something in a group was killed for want of memory: `memory.events` of the unified hierarchy,
//! heard of by one inotify instance for all groups, and `memory.oom_control` of the old one, by a counter of events each.
//! Behaviour: spec 05 §8.
//!
//! An event is a hint, the counter in the group's file is the truth: the old hierarchy tells *before* it kills, also where
//! a group above has no memory left.

use std::{collections::HashMap, io, path::Path, pin::Pin, sync::Arc};

use futures::{
    Stream, StreamExt,
    stream::{SelectAll, unfold},
};
use inotify::{EventMask, EventStream, Inotify, WatchDescriptor, WatchMask, Watches};

use super::memory_events::Counter;

/// Counts events of a group of the unified hierarchy, and of those below it.
const UNIFIED: &str = "memory.events";
/// The same for one group of the old hierarchy.
const OLD: &str = "memory.oom_control";
/// In both.
const KILLS: &str = "oom_kill ";
/// Bytes of events read at once.
const EVENTS: usize = 4096;

/// Hears of many groups, each by a name.
pub struct OomEvents(Kind);

enum Kind {
    Unified { watches: Watches, events: EventStream<Vec<u8>>, names: HashMap<WatchDescriptor, Arc<str>> },
    Old(SelectAll<Pin<Box<dyn Stream<Item = Arc<str>> + Send>>>),
}

impl OomEvents {
    /// Hears of no group yet. Must be called within a runtime.
    ///
    /// # Errors
    /// The kernel has no watch left.
    pub fn new(is_unified: bool) -> io::Result<Self> {
        if !is_unified {
            return Ok(Self(Kind::Old(SelectAll::new())));
        }
        let inotify = Inotify::init()?;
        let watches = inotify.watches();
        Ok(Self(Kind::Unified { watches, events: inotify.into_event_stream(vec![0; EVENTS])?, names: HashMap::new() }))
    }

    /// Hears of the group of that directory, too, until it goes.
    ///
    /// # Errors
    /// There is no such group, or the kernel does not tell.
    pub fn add(&mut self, group: &Path, name: Arc<str>) -> io::Result<()> {
        match &mut self.0 {
            Kind::Unified { watches, names, .. } => {
                names.insert(watches.add(group.join(UNIFIED), WatchMask::MODIFY)?, name);
            }
            Kind::Old(all) => {
                let counter = Counter::of(group, OLD, "")?;
                let group = group.to_owned();
                all.push(Box::pin(unfold((counter, group, name), |(counter, group, name)| async move {
                    counter.next().await.ok()?;
                    group.exists().then(|| (name.clone(), (counter, group, name)))
                })));
            }
        }
        Ok(())
    }

    /// Waits for the next event and says of which group; for ever where there is none to come. Safe to drop.
    pub async fn next(&mut self) -> Arc<str> {
        match &mut self.0 {
            Kind::Unified { events, names, .. } => loop {
                match events.next().await {
                    Some(Ok(event)) if event.mask.contains(EventMask::IGNORED) => {
                        names.remove(&event.wd);
                    }
                    Some(Ok(event)) => {
                        if let Some(name) = names.get(&event.wd) {
                            return name.clone();
                        }
                    }
                    // Nothing more is heard.
                    Some(Err(_)) | None => std::future::pending().await,
                }
            },
            Kind::Old(all) => match all.next().await {
                Some(name) => name,
                None => std::future::pending().await,
            },
        }
    }
}

/// How many processes of the group of that directory were killed for want of memory; `None` where it is gone, or the
/// kernel does not say.
pub fn kills(group: &Path, is_unified: bool) -> Option<u64> {
    let text = std::fs::read_to_string(group.join(if is_unified { UNIFIED } else { OLD })).ok()?;
    text.lines().find_map(|line| line.strip_prefix(KILLS))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::{fs, process::Command, time::Duration};

    use tokio::time::timeout;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn groups_are_heard_of_until_they_go() {
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
        assert_eq!(&*timeout(PATIENCE, events.next()).await.expect("told"), "b");
        assert_eq!((kills(&groups[0], true), kills(&groups[1], true)), (Some(0), Some(2)));
        fs::remove_file(groups[0].join(UNIFIED)).expect("removed");
        assert_eq!(kills(&groups[0], true), None);
        let gone = async {
            loop {
                if let Kind::Unified { names, .. } = &events.0
                    && names.len() == 1
                {
                    return;
                }
                let _ = timeout(Duration::from_millis(10), events.next()).await; // it has no end of its own
            }
        };
        timeout(PATIENCE, gone).await.expect("what is gone is forgotten");
    }

    #[test]
    fn garbage_counts_nothing() {
        let root = tempfile::tempdir().expect("a folder");
        for garbage in ["", "oom_kill", "oom_kill x\n", "oom_kill -1\n", "oom_kill 99999999999999999999999\n", "\0\0"] {
            fs::write(root.path().join(OLD), garbage).expect("written");
            assert_eq!(kills(root.path(), false), None, "{garbage:?}");
        }
        fs::write(root.path().join(OLD), "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n").expect("written");
        assert_eq!(kills(root.path(), false), Some(7));
    }

    #[tokio::test]
    async fn a_killed_child_is_told_of_by_the_old_hierarchy() {
        let test = "a_killed_child_is_told_of_by_the_old_hierarchy";
        let group = Path::new("/sys/fs/cgroup/memory").join(format!("berth-oom-{}", std::process::id()));
        if fs::create_dir(&group).is_err() || fs::write(group.join("memory.limit_in_bytes"), "8388608").is_err() {
            println!("skipped: {test}: needs root and the old hierarchy of memory");
            return;
        }
        let _ = fs::write(group.join("memory.memsw.limit_in_bytes"), "8388608"); // without swap there is no such file
        let mut events = OomEvents::new(false).expect("nothing to refuse");
        events.add(&group, "c".into()).expect("counted");
        let before = kills(&group, false);
        // The shell lives on: what is killed is a child.
        let eats = "head -c 67108864 /dev/zero | tail -c 67108864 | wc -c";
        let script = format!("echo $$ > {}/cgroup.procs; {eats}; exit 0", group.display());
        let shell = tokio::task::spawn_blocking(move || Command::new("sh").arg("-c").arg(script).output());
        let told = timeout(PATIENCE, events.next()).await;
        let ended = timeout(PATIENCE, shell).await;
        let after = kills(&group, false);
        drop(events);
        for _ in 0..1000 {
            if fs::remove_dir(&group).is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(&*told.expect("told"), "c");
        ended.expect("in time").expect("no panic").expect("a shell");
        assert_eq!((before, after), (Some(0), Some(1)));
    }
}
