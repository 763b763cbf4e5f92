//! Watches a container's group for kills for want of memory.
//!
//! The unified hierarchy counts them in `memory.events`, which inotify watches. The old one counts in
//! `memory.oom_control` and tells over an eventfd, *before* it kills: the count is read again a little later.
//! systemd removes the scope of a container as soon as it is empty, which may be before its count was read, and before the
//! kernel's worker has told anybody of a change: the count of the group above has its kills, too, and those that are nobody
//! else's of the pod are then its own.
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
    /// At the start, of the group above (unified hierarchy only), and of the pod's other containers.
    at_start: Beside,
}

/// Kills beside those of a container.
#[derive(Clone, Copy, Debug, Default)]
struct Beside {
    above: u64,
    others: u64,
}

/// What the last look showed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LastLook {
    /// Nothing new.
    Same,
    /// It killed since the look before.
    Killed,
    /// The group has gone, and what it counted last with it: [`Memory::claim`] tells.
    Gone,
}

impl Memory {
    /// Watches the first of these groups that counts; none where none does. `others`: kills so far in other containers of
    /// the group above.
    pub fn watch(groups: &[PathBuf], others: u64) -> Option<Self> {
        let find = |name: &str| groups.iter().map(|group| group.join(name)).find(|file| file.exists());
        let (file, told, is_early) = if let Some(file) = find("memory.events") {
            let told = watch_unified(&file);
            (file, told, false)
        } else {
            let file = find("memory.oom_control")?;
            let told = watch_old(&file);
            (file, told, true)
        };
        let at_start = Beside { above: 0, others };
        let mut memory = Self { file, told, is_early, first: 0, seen: 0, last: None, again: None, at_start };
        memory.at_start.above = memory.count_above();
        memory.seen = memory.count().unwrap_or_default();
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
        let is_told = self.take_told();
        // Whoever looks for another reason takes no second look away.
        let again = if is_told && self.is_early { Some(now + SOON) } else { self.again };
        self.again = again.filter(|at| *at > now);
        if self.update() == LastLook::Killed {
            self.last = Some(now);
        }
    }

    /// Takes what was told: whether anything was.
    fn take_told(&self) -> bool {
        let Some(fd) = &self.told else { return false };
        if self.is_early {
            return rustix::io::read(fd, &mut [0_u8; 8]).is_ok();
        }
        let mut space = [MaybeUninit::uninit(); 512];
        let (mut events, mut is_told) = (inotify::Reader::new(fd, &mut space), false);
        while events.next().is_ok() {
            is_told = true;
        }
        is_told
    }

    /// Looks once more after the end.
    pub fn last_look(&mut self) -> LastLook {
        self.take_told();
        self.update()
    }

    /// Whether the group has gone.
    pub fn is_gone(&self) -> bool {
        self.count().is_none()
    }

    /// Takes for its own what was killed below the group above and in none of its other containers (`others`, so far) since
    /// the start; whether that is more than was seen. To so many `rivals`, which ended at the same time and have no group
    /// any more either, one kill each is left, where there is more than one.
    ///
    /// Where the group above is not the pod's alone (who called us named none), it may take a neighbour's kill for its own.
    pub fn claim(&mut self, others: u64, rivals: u64) -> bool {
        let below = self.count_above().saturating_sub(self.at_start.above);
        let own = below.saturating_sub(others.saturating_sub(self.at_start.others));
        let unseen = own.saturating_sub(self.kills());
        let share = unseen.saturating_sub(rivals).max(unseen.min(1));
        self.seen += share;
        share > 0
    }

    /// When it was last seen to kill.
    pub fn last_kill(&self) -> Option<Instant> {
        self.last
    }

    /// How many it has killed.
    pub fn kills(&self) -> u64 {
        self.seen.saturating_sub(self.first)
    }

    fn update(&mut self) -> LastLook {
        match self.count() {
            None => LastLook::Gone,
            Some(count) if count > self.seen => {
                self.seen = count;
                LastLook::Killed
            }
            Some(_) => LastLook::Same,
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
        let mut memory = Memory::watch(&[folder.path().to_owned()], 0).expect("a counter");
        let start = Instant::now();
        memory.look(start);
        assert_eq!((memory.kills(), memory.last_kill()), (0, None));
        fs::write(&file, "oom_kill 5\n").expect("written");
        memory.look(start);
        assert_eq!((memory.kills(), memory.last_kill()), (1, Some(start)));
        assert_eq!(memory.last_look(), LastLook::Same);
        fs::write(&file, "oom_kill 7\n").expect("written");
        assert_eq!(memory.last_look(), LastLook::Killed);
        assert_eq!((memory.kills(), memory.last_kill()), (3, Some(start)));
        fs::remove_file(&file).expect("removed");
        assert_eq!(memory.last_look(), LastLook::Gone);
        assert!(Memory::watch(&[folder.path().to_owned()], 0).is_none());
    }

    #[test]
    fn who_tells_before_it_kills_is_looked_at_again_whoever_looks_meanwhile() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("memory.oom_control"), "oom_kill 0\n").expect("written");
        let told = eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
        let mut memory = Memory::watch(&[folder.path().to_owned()], 0).expect("a counter");
        memory.told = Some(told);
        let now = Instant::now();
        memory.look(now);
        memory.look(now + SOON / 2);
        assert_eq!(memory.again(), Some(now + SOON));
        memory.look(now + SOON);
        assert_eq!(memory.again(), None);
    }

    #[test]
    fn a_kill_in_a_group_that_has_gone_is_told_by_the_one_above() {
        // What the group itself was seen to kill, what was killed below the one above and in others, others that may have
        // been killed as well, and what follows.
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
            let mut memory = Memory::watch(std::slice::from_ref(&group), 1).expect("a counter");
            fs::write(group.join("memory.events"), format!("oom_kill {}\n", 4 + own)).expect("written");
            memory.look(Instant::now());
            fs::write(&all, format!("oom_kill {above}\n")).expect("written");
            fs::remove_dir_all(&group).expect("removed");
            assert!(memory.is_gone(), "{name}");
            assert_eq!(memory.last_look(), LastLook::Gone, "{name}");
            assert_eq!((memory.claim(others, rivals), memory.kills()), expected, "{name}");
        }
    }
}
