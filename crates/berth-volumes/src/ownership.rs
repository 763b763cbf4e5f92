//! Applies `fsGroup` ownership and permissions to a volume's directory tree. Blocking.
//!
//! Changes children before their directory, so that the root's mode proves that the walk finished. Never follows
//! symlinks; a container may swap a file for a link at any moment, so every change applies to an opened and checked
//! descriptor, never to a path. An entry that is already correct costs one `stat`. Several threads walk a large tree:
//! whichever thread finishes the last child also completes the directory. Implements spec 07 §10, §17.

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
/// Number of entries from which a tree counts as large.
const LARGE: u64 = 2_048;
/// Maximum queued directories; beyond that, a thread walks the directory that it found itself.
const MAX_QUEUED: usize = 256;
/// Maximum directory depth: as deep as a path can be upstream, and a bound on open files.
const DEEPEST: usize = 1_024;
/// Entries between two checks of the clock and of cancellation.
const STRIDE: u64 = 256;
/// Delay of the first notification about a slow walk, and the interval of the following ones.
const SLOW_NOTICE: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(60));
const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Group access to the volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GroupAccess {
    /// Adds `0660` to files and `2770` to directories.
    ReadWrite,
    /// Adds `0440` to files and `2550` to directories.
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

/// Pod setting `fsGroupChangePolicy`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FsGroupChangePolicy {
    /// Changes the whole tree each time.
    Always,
    /// Changes nothing where the root is already correct.
    OnRootMismatch,
}

impl FsGroupChangePolicy {
    /// Returns the policy of the pod; `Always` by default.
    pub fn of(pod: &Pod) -> Self {
        let context = pod.spec().security_context.as_ref();
        match context.and_then(|context| context.fs_group_change_policy.as_deref()) {
            Some("OnRootMismatch") => Self::OnRootMismatch,
            _ => Self::Always,
        }
    }
}

/// Returns the pod's `fsGroup`; `None` where it is unset or not a valid group ID.
pub fn group_of(pod: &Pod) -> Option<u32> {
    let group = pod.spec().security_context.as_ref()?.fs_group?;
    u32::try_from(group).ok()
}

/// Notification about a slow walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Slow {
    /// The walk has taken 30 seconds.
    Still,
    /// The walk has processed this many entries.
    Entries(u64),
}

impl Slow {
    /// Returns the message of the event `VolumePermissionChangeInProgress` for a volume in that directory.
    pub fn message(self, dir: &Path) -> String {
        let mut parts = dir.iter();
        // Upstream prints the path from the pod on.
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

/// Ownership change request.
pub struct OwnershipChange<'a> {
    /// Group to apply.
    pub group: u32,
    /// Access of the group.
    pub access: GroupAccess,
    /// Whether a correct root is sufficient.
    pub policy: FsGroupChangePolicy,
    /// Returns whether the change is canceled, such as because the pod is being deleted.
    pub cancelled: &'a (dyn Fn() -> bool + Sync),
    /// Callback for notifications about a slow walk.
    pub slow: &'a (dyn Fn(Slow) + Sync),
}

impl OwnershipChange<'_> {
    /// Changes the whole tree, whatever its root shows, without cancellation: for volumes that this agent writes.
    pub fn whole(group: u32, access: GroupAccess) -> Self {
        Self { group, access, policy: FsGroupChangePolicy::Always, cancelled: &|| false, slow: &|_| {} }
    }
}

/// Applies group ownership to a whole tree, whatever its root shows, without cancellation.
///
/// # Errors
/// As [`apply_change`].
pub fn apply(root: &Path, group: u32, access: GroupAccess) -> io::Result<()> {
    apply_change(root, &OwnershipChange::whole(group, access))
}

/// Applies an ownership change to a tree. Skips what cannot be changed, as upstream does.
///
/// # Errors
/// If the tree cannot be walked, or with kind `Interrupted` if the change is canceled.
pub fn apply_change(root: &Path, order: &OwnershipChange<'_>) -> io::Result<()> {
    let (Some(parent), Some(name)) = (root.parent(), root.file_name()) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "path has no parent directory or no file name"));
    };
    let parent = openat(CWD, parent, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let name = CString::new(name.as_bytes())?;
    let stat = statat(&parent, &name, AtFlags::SYMLINK_NOFOLLOW)?;
    if order.policy == FsGroupChangePolicy::OnRootMismatch && is_finished(&stat, order) {
        return Ok(());
    }
    let walk = Walk::new(order);
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        walk.file(parent.as_fd(), &name)?;
        return Ok(());
    }
    let top = WalkDirectory::open(parent.as_fd(), &name, None)?;
    walk.run(top)
}

/// Whether the root shows that an earlier walk finished.
fn is_finished(root: &Stat, order: &OwnershipChange<'_>) -> bool {
    // With read-only access, the root is finished with the read-only bits.
    let wanted = match order.access {
        GroupAccess::ReadWrite => 0o2770,
        GroupAccess::ReadOnly => 0o2550,
    };
    let is_directory = FileType::from_raw_mode(root.st_mode) == FileType::Directory;
    is_directory && root.st_gid == order.group && root.st_mode & wanted == wanted
}

/// Directory in progress.
struct WalkDirectory {
    at: OwnedFd,
    above: Option<Arc<WalkDirectory>>,
    depth: usize,
    /// Unfinished child directories, plus one for the directory's own listing.
    open: AtomicUsize,
}

impl WalkDirectory {
    fn open(parent: BorrowedFd<'_>, name: &CStr, above: Option<Arc<WalkDirectory>>) -> io::Result<Arc<Self>> {
        let depth = above.as_ref().map_or(0, |above| above.depth.saturating_add(1));
        if depth > DEEPEST {
            return Err(Errno::NAMETOOLONG.into());
        }
        let at = openat(parent, name, DIRECTORY, Mode::empty())?;
        Ok(Arc::new(Self { at, above, depth, open: AtomicUsize::new(1) }))
    }
}

/// Directory that is queued for a walk.
struct Job {
    above: Arc<WalkDirectory>,
    name: CString,
}

#[derive(Default)]
struct WalkState {
    jobs: Vec<Job>,
    is_over: bool,
    failed: Option<io::Error>,
}

struct Walk<'a> {
    order: &'a OwnershipChange<'a>,
    group: Gid,
    began: Instant,
    shared: Mutex<WalkState>,
    more: Condvar,
    entries: AtomicU64,
    /// Seconds after the start at which the next notification about a slow walk is due.
    next_notice: AtomicU64,
}

impl<'a> Walk<'a> {
    fn new(order: &'a OwnershipChange<'a>) -> Self {
        Self {
            order,
            group: Gid::from_raw(order.group),
            began: Instant::now(),
            shared: Mutex::default(),
            more: Condvar::new(),
            entries: AtomicU64::new(0),
            next_notice: AtomicU64::new(SLOW_NOTICE.0.as_secs()),
        }
    }

    fn shared(&self) -> std::sync::MutexGuard<'_, WalkState> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, top: Arc<WalkDirectory>) -> io::Result<()> {
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

    /// Walks queued directories until all are done.
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

    fn end(&self, shared: &mut WalkState) {
        shared.is_over = true;
        shared.jobs.clear();
        self.more.notify_all();
    }

    fn below(&self, job: Job, hire: &mut dyn FnMut(u64)) -> io::Result<()> {
        let Job { above, name } = job;
        let opened = WalkDirectory::open(above.at.as_fd(), &name, Some(above.clone()));
        match opened {
            Ok(level) => self.level(&level, hire),
            // It was removed or replaced meanwhile, by a process that is responsible for it then.
            Err(e) if is_gone(&e) => {
                self.leave(above);
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    /// Lists a directory and changes its entries that are not directories.
    fn level(&self, level: &Arc<WalkDirectory>, hire: &mut dyn FnMut(u64)) -> io::Result<()> {
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
            if let Some(job) = self.enqueue(Job { above: level.clone(), name: name.to_owned() }) {
                self.below(job, hire)?;
            }
        }
        self.leave(level.clone());
        Ok(())
    }

    /// Queues a directory for another thread; returns it where the queue is full.
    fn enqueue(&self, job: Job) -> Option<Job> {
        let mut shared = self.shared();
        if shared.jobs.len() >= MAX_QUEUED {
            return Some(job);
        }
        shared.jobs.push(job);
        self.more.notify_one();
        None
    }

    /// Records one child as done; the last one completes the directory, which is then a done child of its parent.
    fn leave(&self, level: Arc<WalkDirectory>) {
        let mut level = level;
        while level.open.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.directory(&level);
            let Some(above) = level.above.clone() else { return self.end(&mut self.shared()) };
            level = above;
        }
    }

    /// Counts an entry; at every `STRIDE` entries checks for cancellation and slowness.
    fn tick(&self) -> io::Result<u64> {
        let entries = self.entries.fetch_add(1, Ordering::Relaxed) + 1;
        if !entries.is_multiple_of(STRIDE) {
            return Ok(entries);
        }
        if (self.order.cancelled)() {
            return Err(io::Error::new(io::ErrorKind::Interrupted, "the ownership change was canceled"));
        }
        if self.shared().is_over {
            // Another thread failed and has recorded the error.
            return Err(io::Error::other("stopped"));
        }
        let (elapsed, due) = (self.began.elapsed().as_secs(), self.next_notice.load(Ordering::Relaxed));
        let next = due.saturating_add(SLOW_NOTICE.1.as_secs());
        let is_mine = elapsed >= due
            && self.next_notice.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if is_mine {
            (self.order.slow)(if due == SLOW_NOTICE.0.as_secs() { Slow::Still } else { Slow::Entries(entries) });
        }
        Ok(entries)
    }

    fn directory(&self, level: &WalkDirectory) {
        let changed = fstat(&level.at).and_then(|stat| {
            let wanted = stat.st_mode & 0o7777 | self.order.access.of_directory();
            if stat.st_gid == self.order.group && stat.st_mode & 0o7777 == wanted {
                return Ok(());
            }
            // Changes the group first: `chown` clears the set-group-ID bit.
            fchown(&level.at, None, Some(self.group))?;
            fchmod(&level.at, Mode::from_raw_mode(wanted))
        });
        if let Err(e) = changed {
            debug!(err = %e, "Failed to change ownership or mode of directory");
        }
    }

    /// Changes an entry that is not a directory.
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
                "Failed to change ownership or mode");
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
            return Ok(()); // swapped since; the next walk changes it
        }
        if stat.st_gid != self.order.group {
            chownat(&at, "", None, Some(self.group), AtFlags::EMPTY_PATH)?;
        }
        if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
            return Ok(());
        }
        let mode = Mode::from_raw_mode(stat.st_mode & 0o7777 | self.order.access.of_file());
        // The `/proc` link refers to the opened file, whatever its path names by now.
        chmod(format!("/proc/self/fd/{}", at.as_raw_fd()), mode)
    }
}

fn is_gone(error: &io::Error) -> bool {
    let code = error.raw_os_error();
    [Errno::NOENT, Errno::NOTDIR, Errno::LOOP].iter().any(|errno| Some(errno.raw_os_error()) == code)
}

#[cfg(test)]
mod tests;
