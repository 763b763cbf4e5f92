//! Watches a container's group for kills for want of memory.
//!
//! The unified hierarchy counts them in `memory.events`, which inotify watches. The old one counts in
//! `memory.oom_control` and tells over an eventfd, *before* it kills: the count is read again a little later.
//! systemd removes the scope of a container as soon as it is empty, which may be before its count was read: what was told of
//! it and the count of the group above, which has its kills, too, then say the same.
//! Behaviour: spec 09a §12.

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

/// When the old hierarchy has killed after telling.
const SOON: Duration = Duration::from_millis(100);

/// The counter of one container.
#[derive(Debug)]
pub struct Memory {
    file: PathBuf,
    told: Option<OwnedFd>,
    is_early: bool,
    first: u64,
    seen: u64,
    last: Option<Instant>,
    again: Option<Instant>,
    /// Of the group above; unified hierarchy only.
    above: u64,
    /// Whether a change was told of that could not be read any more.
    is_missed: bool,
}

impl Memory {
    /// Watches the first of these groups that counts; none where none does.
    pub fn watch(groups: &[PathBuf]) -> Option<Self> {
        let find = |name: &str| groups.iter().map(|group| group.join(name)).find(|file| file.exists());
        let (file, told, is_early) = if let Some(file) = find("memory.events") {
            let told = watch_unified(&file);
            (file, told, false)
        } else {
            let file = find("memory.oom_control")?;
            let told = watch_old(&file);
            (file, told, true)
        };
        let mut memory =
            Self { file, told, is_early, first: 0, seen: 0, last: None, again: None, above: 0, is_missed: false };
        memory.seen = memory.count().unwrap_or_default();
        memory.above = memory.count_above();
        memory.first = memory.seen;
        Some(memory)
    }

    /// Readable when something happened.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.told.as_ref().map(OwnedFd::as_fd)
    }

    /// When to look again by itself.
    pub fn again(&self) -> Option<Instant> {
        self.again
    }

    /// Takes what was told, and looks.
    pub fn look(&mut self, now: Instant) {
        let told = self.take_told();
        self.again = (told.is_some() && self.is_early).then(|| now + SOON);
        self.update(now, told == Some(true));
    }

    /// Takes what was told: whether that was a change of the file; nothing where nothing was.
    fn take_told(&self) -> Option<bool> {
        let fd = self.told.as_ref()?;
        if self.is_early {
            return rustix::io::read(fd, &mut [0_u8; 8]).ok().map(|_| false);
        }
        let mut space = [MaybeUninit::uninit(); 512];
        let (mut events, mut told) = (inotify::Reader::new(fd, &mut space), None);
        while let Ok(event) = events.next() {
            told = Some(told == Some(true) || event.events().contains(inotify::ReadFlags::MODIFY));
        }
        told
    }

    /// Looks once more after the end; whether it killed since the last look.
    pub fn last_look(&mut self, now: Instant) -> bool {
        let before = self.seen;
        let earlier = self.last;
        let told = self.take_told();
        self.update(now, told == Some(true));
        self.last = earlier;
        self.seen > before
    }

    /// When it was last seen to kill.
    pub fn last_kill(&self) -> Option<Instant> {
        self.last
    }

    /// How many it has killed.
    pub fn kills(&self) -> u64 {
        self.seen.saturating_sub(self.first)
    }

    fn update(&mut self, now: Instant, is_changed: bool) {
        let above = self.count_above();
        let count = match self.count() {
            Some(count) => {
                self.above = above;
                count
            }
            // The group has gone: nothing more is killed.
            None => {
                self.is_missed |= is_changed;
                let missed = above.saturating_sub(self.above);
                if self.is_missed { self.seen + missed } else { self.seen }
            }
        };
        if count > self.seen {
            self.seen = count;
            self.above = above;
            self.last = Some(now);
        }
    }

    /// What the file says; nothing where it is gone.
    fn count(&self) -> Option<u64> {
        oom_kills(&fs::read_to_string(&self.file).ok()?)
    }

    fn count_above(&self) -> u64 {
        let above = self.file.parent().and_then(Path::parent).filter(|_| !self.is_early);
        let text = above.and_then(|above| fs::read_to_string(above.join("memory.events")).ok());
        text.and_then(|text| oom_kills(&text)).unwrap_or_default()
    }
}

/// The field `oom_kill` of either file.
fn oom_kills(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

/// Without the watch only the last look counts.
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
        let mut memory = Memory::watch(&[folder.path().to_owned()]).expect("a counter");
        let start = Instant::now();
        memory.look(start);
        assert_eq!((memory.kills(), memory.last_kill()), (0, None));
        fs::write(&file, "oom_kill 5\n").expect("written");
        memory.look(start);
        assert_eq!((memory.kills(), memory.last_kill()), (1, Some(start)));
        assert!(!memory.last_look(start + SOON));
        fs::write(&file, "oom_kill 7\n").expect("written");
        assert!(memory.last_look(start + SOON));
        assert_eq!((memory.kills(), memory.last_kill()), (3, Some(start)));
        fs::remove_file(&file).expect("removed");
        assert!(!memory.last_look(start), "the group has gone");
        assert!(Memory::watch(&[folder.path().to_owned()]).is_none());
    }

    #[test]
    fn a_kill_in_a_group_that_has_gone_is_told_by_the_one_above() {
        let start = Instant::now();
        // How often it killed in the group itself, and above it in all, before the look.
        for (name, writes, above, expected) in [
            ("killed", true, 3, (true, 1)),
            ("in another group", false, 3, (false, 0)),
            ("it met its limit", true, 2, (false, 0)),
        ] {
            let pod = tempfile::tempdir().expect("a folder");
            let (own, all) = (pod.path().join("own/memory.events"), pod.path().join("memory.events"));
            fs::create_dir(pod.path().join("own")).expect("a group");
            fs::write(&own, "oom_kill 0\n").expect("written");
            fs::write(&all, "oom_kill 2\n").expect("written");
            let mut memory = Memory::watch(&[pod.path().join("own")]).expect("a counter");
            if writes {
                let mut file = OpenOptions::new().append(true).open(&own).expect("open");
                file.write_all(b"oom 1\n").expect("written");
            }
            fs::write(&all, format!("oom_kill {above}\n")).expect("written");
            fs::remove_dir_all(pod.path().join("own")).expect("removed");
            memory.look(start);
            let seen = memory.last_look(start) || memory.last_kill().is_some();
            assert_eq!((seen, memory.kills()), expected, "{name}");
        }
    }
}
