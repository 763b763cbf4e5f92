//! Watches a container's group for kills for want of memory.
//!
//! The unified hierarchy counts them in `memory.events`, which inotify watches. The old one counts in
//! `memory.oom_control` and tells over an eventfd, *before* it kills: the count is read again a little later.
//! Behaviour: spec 09a §12.

use std::{
    fs::{self, OpenOptions},
    io::Write,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::PathBuf,
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
        let mut memory = Self { file, told, is_early, first: 0, seen: 0, last: None, again: None };
        memory.seen = memory.count();
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
        let mut bytes = [0_u8; 512];
        let told = self.told.as_ref().is_some_and(|fd| rustix::io::read(fd, &mut bytes).is_ok());
        self.again = (told && self.is_early).then(|| now + SOON);
        self.update(now);
    }

    /// Looks once more after the end; whether it killed since the last look.
    pub fn last_look(&mut self, now: Instant) -> bool {
        let before = self.seen;
        let earlier = self.last;
        self.update(now);
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

    fn update(&mut self, now: Instant) {
        let count = self.count();
        if count > self.seen {
            self.seen = count;
            self.last = Some(now);
        }
    }

    fn count(&self) -> u64 {
        let text = fs::read_to_string(&self.file).unwrap_or_default(); // the group has gone: nothing more is killed
        oom_kills(&text).unwrap_or(self.seen)
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
}
