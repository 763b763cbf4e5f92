//! Gives a volume to the pod's group. Blocking. Behaviour: spec 07 §10, §17.
//!
//! Children come before their directory, so that the root's mode says that the work was finished. Links are never
//! followed, and a container may swap a file for one at any moment: what is changed is what was opened and looked at,
//! never a path. What is right already costs one look. A large tree is walked by several threads: a directory is done
//! by whoever finishes the last of its children.

use std::{
    ffi::{CStr, CString, OsStr},
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::{
    fs::{AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, Stat, chmod, chownat, fchmod, fchown, fstat, openat, statat},
    io::Errno,
};
use tracing::debug;

use berth_types::Pod;

/// Threads that walk one large tree.
const WALKERS: usize = 4;
/// Entries after which a tree counts as large.
const LARGE: u64 = 2_048;
/// Directories that wait for a walker; what is more is walked by who found it.
const WAITING: usize = 256;
/// Levels of directories: as many as a path of the reference can have, and a bound on open files.
const DEEPEST: usize = 1_024;
/// Entries between two looks at the clock and at whether anybody still wants this.
const STRIDE: u64 = 256;
/// When it is told first that this takes long, and how often after that.
const TOLD: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(60));
const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// What the group may do with the volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GroupAccess {
    /// Read and write.
    ReadWrite,
    /// Read.
    ReadOnly,
}

impl GroupAccess {
    fn of_file(self) -> u32 {
        match self {
            Self::ReadWrite => 0o660,
            Self::ReadOnly => 0o440,
        }
    }

    fn of_directory(self) -> u32 {
        self.of_file() | 0o2110
    }
}

/// `fsGroupChangePolicy`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    /// The whole tree each time.
    Always,
    /// Nothing where the root is right already.
    OnRootMismatch,
}

impl Policy {
    /// What the pod asks for.
    pub fn of(pod: &Pod) -> Self {
        let context = pod.spec().security_context.as_ref();
        match context.and_then(|context| context.fs_group_change_policy.as_deref()) {
            Some("OnRootMismatch") => Self::OnRootMismatch,
            _ => Self::Always,
        }
    }
}

/// The pod's fsGroup; `None` where it is unset or no group ID.
pub fn group_of(pod: &Pod) -> Option<u32> {
    let group = pod.spec().security_context.as_ref()?.fs_group?;
    u32::try_from(group).ok()
}

/// What is told of a walk that takes long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Slow {
    /// It has taken half a minute.
    Still,
    /// So many entries were looked at.
    Entries(u64),
}

impl Slow {
    /// The message of the event `VolumePermissionChangeInProgress` for a volume in that directory.
    pub fn message(self, dir: &Path) -> String {
        let mut parts = dir.iter();
        // As the reference names it: from the pod on.
        let of_pod: &Path = if parts.by_ref().any(|part| part == "pods") { parts.as_path() } else { dir };
        let shown = of_pod.display();
        match self {
            Self::Still => format!(
                "Setting volume ownership for {shown} is taking longer than expected, consider using OnRootMismatch - \
                 https://kubernetes.io/docs/tasks/configure-pod-container/security-context/\
                 #configure-volume-permission-and-ownership-change-policy-for-pods"
            ),
            Self::Entries(count) => format!("Setting volume ownership for {shown}, processed {count} files."),
        }
    }
}

/// A change of ownership.
pub struct Order<'a> {
    /// To which group.
    pub group: u32,
    /// What it may do.
    pub access: GroupAccess,
    /// Whether a root that is right is enough.
    pub policy: Policy,
    /// Whether nobody wants this any more: the pod is being deleted.
    pub cancelled: &'a (dyn Fn() -> bool + Sync),
    /// Takes what is told of a walk that takes long.
    pub slow: &'a (dyn Fn(Slow) + Sync),
}

impl Order<'_> {
    /// The whole tree, whatever its root says, however long it takes: for volumes that this agent writes.
    pub fn whole(group: u32, access: GroupAccess) -> Self {
        Self { group, access, policy: Policy::Always, cancelled: &|| false, slow: &|_| {} }
    }
}

/// Gives a whole tree to a group, whatever its root says, however long it takes.
///
/// # Errors
/// As [`carry_out`].
pub fn apply(root: &Path, group: u32, access: GroupAccess) -> io::Result<()> {
    carry_out(root, &Order::whole(group, access))
}

/// Carries an order out on a tree. What cannot be changed is skipped, as the reference does.
///
/// # Errors
/// If the tree cannot be walked, and `Interrupted` where it was cancelled.
pub fn carry_out(root: &Path, order: &Order<'_>) -> io::Result<()> {
    let (Some(parent), Some(name)) = (root.parent(), root.file_name()) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a path of an entry"));
    };
    let parent = openat(CWD, parent, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let name = CString::new(name.as_bytes())?;
    let stat = statat(&parent, &name, AtFlags::SYMLINK_NOFOLLOW)?;
    if order.policy == Policy::OnRootMismatch && is_finished(&stat, order) {
        return Ok(());
    }
    let walk = Walk::new(order);
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        walk.file(parent.as_fd(), &name)?;
        return Ok(());
    }
    let top = Level::open(parent.as_fd(), &name, None)?;
    walk.run(top)
}

/// Whether the root shows that a walk before was finished.
fn is_finished(root: &Stat, order: &Order<'_>) -> bool {
    // A root that may only be read is finished with the read-only bits.
    let wanted = match order.access {
        GroupAccess::ReadWrite => 0o2770,
        GroupAccess::ReadOnly => 0o2550,
    };
    let is_directory = FileType::from_raw_mode(root.st_mode) == FileType::Directory;
    is_directory && root.st_gid == order.group && root.st_mode & wanted == wanted
}

/// A directory that is being walked.
struct Level {
    at: OwnedFd,
    above: Option<Arc<Level>>,
    depth: usize,
    /// Directories below that are not done, and one for its own listing.
    open: AtomicUsize,
}

impl Level {
    fn open(parent: BorrowedFd<'_>, name: &CStr, above: Option<Arc<Level>>) -> io::Result<Arc<Self>> {
        let depth = above.as_ref().map_or(0, |above| above.depth.saturating_add(1));
        if depth > DEEPEST {
            return Err(Errno::NAMETOOLONG.into());
        }
        let at = openat(parent, name, DIRECTORY, Mode::empty())?;
        Ok(Arc::new(Self { at, above, depth, open: AtomicUsize::new(1) }))
    }
}

/// A directory that nobody walks yet.
struct Job {
    above: Arc<Level>,
    name: CString,
}

#[derive(Default)]
struct Shared {
    jobs: Vec<Job>,
    is_over: bool,
    failed: Option<io::Error>,
}

struct Walk<'a> {
    order: &'a Order<'a>,
    group: Gid,
    began: Instant,
    shared: Mutex<Shared>,
    more: Condvar,
    entries: AtomicU64,
    /// Seconds after the beginning at which it is told next that this takes long.
    next_told: AtomicU64,
}

impl<'a> Walk<'a> {
    fn new(order: &'a Order<'a>) -> Self {
        Self {
            order,
            group: Gid::from_raw(order.group),
            began: Instant::now(),
            shared: Mutex::default(),
            more: Condvar::new(),
            entries: AtomicU64::new(0),
            next_told: AtomicU64::new(TOLD.0.as_secs()),
        }
    }

    fn shared(&self) -> std::sync::MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, top: Arc<Level>) -> io::Result<()> {
        thread::scope(|scope| {
            let mut helpers = 0;
            let mut hire = |entries: u64| {
                if entries >= LARGE && helpers == 0 {
                    helpers = WALKERS - 1;
                    for _ in 0..helpers {
                        scope.spawn(|| self.work(&mut |_| {}));
                    }
                }
            };
            self.keep(self.level(&top, &mut hire));
            drop(top);
            self.work(&mut hire);
        });
        match self.shared().failed.take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Walks directories that wait until all are done.
    fn work(&self, hire: &mut dyn FnMut(u64)) {
        loop {
            let mut shared = self.shared();
            let job = loop {
                if shared.is_over {
                    return;
                }
                if let Some(job) = shared.jobs.pop() {
                    break job;
                }
                shared = self.more.wait(shared).unwrap_or_else(PoisonError::into_inner);
            };
            drop(shared);
            self.keep(self.below(job, hire));
        }
    }

    fn keep(&self, done: io::Result<()>) {
        if let Err(error) = done {
            let mut shared = self.shared();
            shared.failed.get_or_insert(error);
            self.end(&mut shared);
        }
    }

    fn end(&self, shared: &mut Shared) {
        shared.is_over = true;
        shared.jobs.clear();
        self.more.notify_all();
    }

    fn below(&self, job: Job, hire: &mut dyn FnMut(u64)) -> io::Result<()> {
        let Job { above, name } = job;
        let opened = Level::open(above.at.as_fd(), &name, Some(above.clone()));
        match opened {
            Ok(level) => self.level(&level, hire),
            // It went meanwhile, or became something else: whoever did that sees to it.
            Err(e) if is_gone(&e) => {
                self.leave(above);
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    /// Lists a directory and does what is no directory in it.
    fn level(&self, level: &Arc<Level>, hire: &mut dyn FnMut(u64)) -> io::Result<()> {
        for child in Dir::read_from(&level.at)? {
            let child = child?;
            let name = child.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            hire(self.tick()?);
            let kind = match child.file_type() {
                FileType::Unknown => match statat(&level.at, name, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(stat) => FileType::from_raw_mode(stat.st_mode),
                    Err(Errno::NOENT) => continue,
                    Err(e) => return Err(e.into()),
                },
                known => known,
            };
            if kind != FileType::Directory {
                self.file(level.at.as_fd(), name)?;
                continue;
            }
            level.open.fetch_add(1, Ordering::Relaxed);
            if let Some(job) = self.give(Job { above: level.clone(), name: name.to_owned() }) {
                self.below(job, hire)?;
            }
        }
        self.leave(level.clone());
        Ok(())
    }

    /// Lets another walk it; back where too many wait.
    fn give(&self, job: Job) -> Option<Job> {
        let mut shared = self.shared();
        if shared.jobs.len() >= WAITING {
            return Some(job);
        }
        shared.jobs.push(job);
        self.more.notify_one();
        None
    }

    /// One thing of a directory is done; with the last one the directory itself is, and one thing of that above.
    fn leave(&self, level: Arc<Level>) {
        let mut level = level;
        while level.open.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.directory(&level);
            let Some(above) = level.above.clone() else { return self.end(&mut self.shared()) };
            level = above;
        }
    }

    /// Counts an entry; now and then looks at the clock.
    fn tick(&self) -> io::Result<u64> {
        let entries = self.entries.fetch_add(1, Ordering::Relaxed) + 1;
        if !entries.is_multiple_of(STRIDE) {
            return Ok(entries);
        }
        if (self.order.cancelled)() {
            return Err(io::Error::new(io::ErrorKind::Interrupted, "the change of ownership was cancelled"));
        }
        if self.shared().is_over {
            // Another walker failed, and has told why.
            return Err(io::Error::other("stopped"));
        }
        let (elapsed, due) = (self.began.elapsed().as_secs(), self.next_told.load(Ordering::Relaxed));
        let next = due.saturating_add(TOLD.1.as_secs());
        let is_mine =
            elapsed >= due && self.next_told.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if is_mine {
            (self.order.slow)(if due == TOLD.0.as_secs() { Slow::Still } else { Slow::Entries(entries) });
        }
        Ok(entries)
    }

    fn directory(&self, level: &Level) {
        let changed = fstat(&level.at).and_then(|stat| {
            let wanted = stat.st_mode & 0o7777 | self.order.access.of_directory();
            if stat.st_gid == self.order.group && stat.st_mode & 0o7777 == wanted {
                return Ok(());
            }
            // The change of group first: it clears the set-group-ID bit.
            fchown(&level.at, None, Some(self.group))?;
            fchmod(&level.at, Mode::from_raw_mode(wanted))
        });
        if let Err(e) = changed {
            debug!(err = %e, "Changing the owner or mode of a directory failed");
        }
    }

    /// Whatever is no directory.
    fn file(&self, parent: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
        let stat = match statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        if !self.is_right(&stat)
            && let Err(e) = self.change(parent, name)
        {
            debug!(name = %OsStr::from_bytes(name.to_bytes()).to_string_lossy(), err = %e,
                "Changing the owner or mode failed");
        }
        Ok(())
    }

    fn is_right(&self, stat: &Stat) -> bool {
        let bits = self.order.access.of_file();
        let is_link = FileType::from_raw_mode(stat.st_mode) == FileType::Symlink;
        stat.st_gid == self.order.group && (is_link || stat.st_mode & bits == bits)
    }

    fn change(&self, parent: BorrowedFd<'_>, name: &CStr) -> rustix::io::Result<()> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let at = openat(parent, name, flags, Mode::empty())?;
        let stat = fstat(&at)?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            return Ok(()); // swapped since; it has its own turn next time
        }
        if stat.st_gid != self.order.group {
            chownat(&at, "", None, Some(self.group), AtFlags::EMPTY_PATH)?;
        }
        if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
            return Ok(());
        }
        let mode = Mode::from_raw_mode(stat.st_mode & 0o7777 | self.order.access.of_file());
        // Our own link leads to what was opened, whatever bears its name by now.
        chmod(format!("/proc/self/fd/{}", at.as_raw_fd()), mode)
    }
}

fn is_gone(error: &io::Error) -> bool {
    let code = error.raw_os_error();
    [Errno::NOENT, Errno::NOTDIR, Errno::LOOP].iter().any(|errno| Some(errno.raw_os_error()) == code)
}

#[cfg(test)]
mod tests;
