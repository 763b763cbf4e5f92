//! inotify watcher of writes to cgroup files, by any process.
//!
//! systemd resets values on a daemon reload, and people change them by `systemctl set-property`. The kernel reports
//! each write to an interface file; one watch per directory. Implements spec 06a §7 (deviation).

use std::{
    collections::{BTreeSet, HashMap},
    ffi::OsString,
    io,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use inotify::{Event, EventMask, EventStream, Inotify, WatchDescriptor, WatchMask, Watches};
use tokio::time::{Instant, timeout_at};
use tokio_stream::StreamExt;

use crate::cgroup::GroupPath;

/// Debounce interval: further writes are collected this long after the first.
const SETTLE: Duration = Duration::from_millis(200);
/// Size of the event buffer, bytes.
const BUFFER: usize = 4096;

/// Set of watched cgroups.
#[derive(Clone)]
pub struct CgroupWatcher {
    watches: Arc<Mutex<Watches>>,
    groups: Arc<Mutex<HashMap<WatchDescriptor, GroupPath>>>,
}

/// Receiver of write notifications.
pub struct WriteEvents {
    events: EventStream<Vec<u8>>,
    groups: Arc<Mutex<HashMap<WatchDescriptor, GroupPath>>>,
    written: BTreeSet<GroupPath>,
    until: Option<Instant>,
}

/// Cgroups with written files.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum WrittenCgroups {
    /// These cgroups.
    Groups(BTreeSet<GroupPath>),
    /// Unknown cgroups: the kernel's event queue overflowed.
    Any,
}

/// Creates a watcher and its receiver. Must be called within a runtime.
///
/// # Errors
/// If no inotify instance can be created.
pub fn watch() -> io::Result<(CgroupWatcher, WriteEvents)> {
    let events = Inotify::init()?.into_event_stream(vec![0; BUFFER])?;
    let groups = Arc::new(Mutex::new(HashMap::new()));
    let watches = Arc::new(Mutex::new(events.watches()));
    Ok((
        CgroupWatcher { watches, groups: groups.clone() },
        WriteEvents { events, groups, written: BTreeSet::new(), until: None },
    ))
}

impl CgroupWatcher {
    /// Watches a cgroup's directory until it is removed.
    ///
    /// # Errors
    /// If no inotify watch is available, or the directory does not exist.
    pub fn add(&self, group: &GroupPath, directory: &Path) -> io::Result<()> {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let mut watches = self.watches.lock().unwrap_or_else(PoisonError::into_inner);
        let descriptor = watches.add(directory, WatchMask::MODIFY | WatchMask::ONLYDIR)?;
        groups.insert(descriptor, group.clone());
        Ok(())
    }
}

impl WriteEvents {
    /// Waits for writes, and returns them after the debounce interval. Cancel-safe.
    pub async fn next(&mut self) -> WrittenCgroups {
        loop {
            let event = match self.until {
                None => self.events.next().await,
                Some(until) => match timeout_at(until, self.events.next()).await {
                    Ok(event) => event,
                    Err(_) => {
                        self.until = None;
                        return WrittenCgroups::Groups(std::mem::take(&mut self.written));
                    }
                },
            };
            match event {
                Some(Ok(event)) if event.mask.contains(EventMask::Q_OVERFLOW) => return WrittenCgroups::Any,
                Some(Ok(event)) => self.handle_event(&event),
                Some(Err(_)) => return WrittenCgroups::Any,
                None => return std::future::pending().await,
            }
        }
    }

    fn handle_event(&mut self, event: &Event<OsString>) {
        if let Some(group) = self.group(event) {
            self.written.insert(group);
            self.until.get_or_insert_with(|| Instant::now() + SETTLE);
        }
    }

    fn group(&self, event: &Event<OsString>) -> Option<GroupPath> {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        if event.mask.contains(EventMask::IGNORED) {
            groups.remove(&event.wd);
            return None;
        }
        groups.get(&event.wd).cloned()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[tokio::test]
    async fn writes_are_reported_by_cgroup() {
        let root = tempfile::tempdir().expect("a directory");
        let (watch, mut writes) = watch().expect("a watch");
        let group = |name: &str| GroupPath::parse(name).expect("plain");
        for name in ["a", "b", "c"] {
            fs::create_dir(root.path().join(name)).expect("made");
            fs::write(root.path().join(name).join("cpu.weight"), "1").expect("written");
            watch.add(&group(name), &root.path().join(name)).expect("watched");
        }
        for name in ["a", "b", "a"] {
            fs::write(root.path().join(name).join("cpu.weight"), "2").expect("written");
        }
        assert_eq!(writes.next().await, WrittenCgroups::Groups([group("a"), group("b")].into()));
        fs::remove_dir_all(root.path().join("c")).expect("removed");
        fs::write(root.path().join("b/cpu.weight"), "3").expect("written");
        assert_eq!(writes.next().await, WrittenCgroups::Groups([group("b")].into()));
        assert_eq!(watch.groups.lock().map(|groups| groups.len()).ok(), Some(2));
    }
}
