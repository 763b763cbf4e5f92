//! OOM kill counter of a container's cgroup, v1 and v2.
//!
//! cgroup v2 counts kills in `oom_counter.events`, watched by inotify. cgroup v1 counts them in `oom_counter.oom_control` and
//! notifies over an eventfd *before* it kills: the count is read again a little later.
//! systemd removes a container's scope as soon as it is empty, possibly before its count was read, and before the
//! kernel's worker has notified anybody of a change: the parent cgroup's count includes its kills, and those that
//! belong to no other container of the pod are then attributed to it.
//! Implements spec 09a §12.

use std::{
    fs::{self, OpenOptions},
    io::Write,
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    event::{EventfdFlags, eventfd},
    fs::inotify,
};

/// Delay after which cgroup v1 has killed after its notification.
const SOON: Duration = Duration::from_millis(100);

/// OOM kill counter of one container.
#[derive(Debug)]
pub struct OomCounter {
    file: PathBuf,
    notifications: Option<OwnedFd>,
    is_early: bool,
    first: u64,
    seen: u64,
    last: Option<Instant>,
    again: Option<Instant>,
    /// Counts at the start: of the parent cgroup (cgroup v2 only), and of the pod's other containers.
    at_start: BaselineCounts,
}

/// OOM kill counts other than the container's own.
#[derive(Clone, Copy, Debug, Default)]
struct BaselineCounts {
    above: u64,
    others: u64,
}

/// Result of a final read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FinalRead {
    /// No new kill.
    Same,
    /// The count rose since the previous read.
    Killed,
    /// The cgroup was removed together with its last count: see [`OomCounter::attribute_kills`].
    Gone,
}

impl OomCounter {
    /// Watches the first of these cgroups that has a counter; `None` if none has. `others`: kills so far in other
    /// containers of the parent cgroup.
    pub fn watch(groups: &[PathBuf], others: u64) -> Option<Self> {
        let find = |name: &str| groups.iter().map(|group| group.join(name)).find(|file| file.exists());
        let (file, notifications, is_early) = if let Some(file) = find("memory.events") {
            let notifications = watch_unified(&file);
            (file, notifications, false)
        } else {
            let file = find("memory.oom_control")?;
            let notifications = watch_old(&file);
            (file, notifications, true)
        };
        let at_start = BaselineCounts { above: 0, others };
        let mut memory = Self { file, notifications, is_early, first: 0, seen: 0, last: None, again: None, at_start };
        memory.at_start.above = memory.count_above();
        memory.seen = memory.count().unwrap_or_default();
        memory.first = memory.seen;
        Some(memory)
    }

    /// Notification descriptor, readable when the count may have changed; `None` without a watch.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.notifications.as_ref().map(OwnedFd::as_fd)
    }

    /// When to read the count again without a notification.
    pub fn again(&self) -> Option<Instant> {
        self.again
    }

    /// Consumes notifications, and reads the count.
    pub fn read_count(&mut self, now: Instant) {
        let is_notified = self.drain_notifications();
        // A read for another reason does not cancel the scheduled second read.
        let again = if is_notified && self.is_early { Some(now + SOON) } else { self.again };
        self.again = again.filter(|at| *at > now);
        if self.update() == FinalRead::Killed {
            self.last = Some(now);
        }
    }

    /// Consumes notifications; returns whether there were any.
    fn drain_notifications(&self) -> bool {
        let Some(fd) = &self.notifications else { return false };
        if self.is_early {
            return rustix::io::read(fd, &mut [0_u8; 8]).is_ok();
        }
        let mut space = [MaybeUninit::uninit(); 512];
        let (mut events, mut is_notified) = (inotify::Reader::new(fd, &mut space), false);
        while events.next().is_ok() {
            is_notified = true;
        }
        is_notified
    }

    /// Reads the count once more after the container's exit.
    pub fn final_read(&mut self) -> FinalRead {
        self.drain_notifications();
        self.update()
    }

    /// Whether the cgroup was removed.
    pub fn is_gone(&self) -> bool {
        self.count().is_none()
    }

    /// Attributes to this container the kills in the parent cgroup since the start that belong to none of its other
    /// containers (`others`, so far); returns whether that is more than was counted before. `rivals` is the number of
    /// containers that exited at the same time and whose cgroups are gone too: one kill is left for each of them, if
    /// there is more than one.
    ///
    /// If the parent cgroup is not the pod's alone (the caller named none), a neighbor's kill may be attributed to it.
    pub fn attribute_kills(&mut self, others: u64, rivals: u64) -> bool {
        let below = self.count_above().saturating_sub(self.at_start.above);
        let own = below.saturating_sub(others.saturating_sub(self.at_start.others));
        let unseen = own.saturating_sub(self.kills());
        let share = unseen.saturating_sub(rivals).max(unseen.min(1));
        self.seen += share;
        share > 0
    }

    /// Time at which a kill was last observed.
    pub fn last_kill(&self) -> Option<Instant> {
        self.last
    }

    /// Number of kills since the start.
    pub fn kills(&self) -> u64 {
        self.seen.saturating_sub(self.first)
    }

    fn update(&mut self) -> FinalRead {
        match self.count() {
            None => FinalRead::Gone,
            Some(count) if count > self.seen => {
                self.seen = count;
                FinalRead::Killed
            }
            Some(_) => FinalRead::Same,
        }
    }

    /// Current count of the file; `None` if the file is gone.
    fn count(&self) -> Option<u64> {
        oom_kills(&fs::read_to_string(&self.file).ok()?)
    }

    fn count_above(&self) -> u64 {
        let above = self.file.parent().and_then(Path::parent).filter(|_| !self.is_early);
        let text = above.and_then(|above| fs::read_to_string(above.join("memory.events")).ok());
        text.and_then(|text| oom_kills(&text)).unwrap_or_default()
    }
}

/// Parses the field `oom_kill` of either file.
fn oom_kills(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

/// Without the watch only the final read counts.
fn watch_unified(file: &PathBuf) -> Option<OwnedFd> {
    let fd = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK).ok()?;
    inotify::add_watch(&fd, file, inotify::WatchFlags::MODIFY).ok()?;
    Some(fd)
}

fn watch_old(file: &PathBuf) -> Option<OwnedFd> {
    let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()?;
    let control = fs::File::open(file).ok()?;
    let mut register = OpenOptions::new().write(true).open(file.with_file_name("cgroup.event_control")).ok()?;
    write!(register, "{} {}", fd.as_raw_fd(), control.as_raw_fd()).ok()?;
    Some(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_files_are_read() {
        for (text, expected) in [
            ("low 0\nhigh 0\nmax 5\noom 2\noom_kill 1\noom_group_kill 0\n", Some(1)),
            ("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", Some(3)),
            ("oom_kill x\n", None),
            ("", None),
        ] {
            assert_eq!(oom_kills(text), expected, "{text}");
        }
    }

    #[test]
    fn kills_are_counted_from_the_start_of_the_container() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("memory.events");
        fs::write(&file, "oom_kill 4\n").expect("written");
        let mut memory = OomCounter::watch(&[folder.path().to_owned()], 0).expect("a counter");
        let start = Instant::now();
        memory.read_count(start);
        assert_eq!((memory.kills(), memory.last_kill()), (0, None));
        fs::write(&file, "oom_kill 5\n").expect("written");
        memory.read_count(start);
        assert_eq!((memory.kills(), memory.last_kill()), (1, Some(start)));
        assert_eq!(memory.final_read(), FinalRead::Same);
        fs::write(&file, "oom_kill 7\n").expect("written");
        assert_eq!(memory.final_read(), FinalRead::Killed);
        assert_eq!((memory.kills(), memory.last_kill()), (3, Some(start)));
        fs::remove_file(&file).expect("removed");
        assert_eq!(memory.final_read(), FinalRead::Gone);
        assert!(OomCounter::watch(&[folder.path().to_owned()], 0).is_none());
    }

    #[test]
    fn an_early_notification_schedules_a_second_read_that_other_reads_keep() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("memory.oom_control"), "oom_kill 0\n").expect("written");
        let notifications = eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
        let mut memory = OomCounter::watch(&[folder.path().to_owned()], 0).expect("a counter");
        memory.notifications = Some(notifications);
        let now = Instant::now();
        memory.read_count(now);
        memory.read_count(now + SOON / 2);
        assert_eq!(memory.again(), Some(now + SOON));
        memory.read_count(now + SOON);
        assert_eq!(memory.again(), None);
    }

    #[test]
    fn a_kill_in_a_removed_cgroup_is_counted_through_its_parent() {
        // Kills seen in the cgroup itself, in its parent, and in other containers; rivals; expected result.
        for (name, own, above, others, rivals, expected) in [
            ("killed, and never looked at", 0, 3, 1, 0, (true, 1)),
            ("another container was killed", 0, 3, 2, 0, (false, 0)),
            ("both", 0, 5, 3, 0, (true, 1)),
            ("nobody", 0, 2, 1, 0, (false, 0)),
            ("all that it killed was seen", 1, 3, 1, 0, (false, 1)),
            ("it killed again", 1, 4, 1, 0, (true, 2)),
            ("the group above has gone, too", 1, 0, 1, 0, (false, 1)),
            ("one each", 0, 4, 1, 1, (true, 1)),
            ("one each, and one more", 0, 5, 1, 1, (true, 2)),
            ("one of the two", 0, 3, 1, 1, (true, 1)),
            ("none of the two", 0, 2, 1, 1, (false, 0)),
        ] {
            let pod = tempfile::tempdir().expect("a folder");
            let (group, all) = (pod.path().join("own"), pod.path().join("memory.events"));
            fs::create_dir(&group).expect("a group");
            fs::write(group.join("memory.events"), "oom_kill 4\n").expect("written");
            fs::write(&all, "oom_kill 2\n").expect("written");
            let mut memory = OomCounter::watch(std::slice::from_ref(&group), 1).expect("a counter");
            fs::write(group.join("memory.events"), format!("oom_kill {}\n", 4 + own)).expect("written");
            memory.read_count(Instant::now());
            fs::write(&all, format!("oom_kill {above}\n")).expect("written");
            fs::remove_dir_all(&group).expect("removed");
            assert!(memory.is_gone(), "{name}");
            assert_eq!(memory.final_read(), FinalRead::Gone, "{name}");
            assert_eq!((memory.attribute_kills(others, rivals), memory.kills()), expected, "{name}");
        }
    }
}
