//! A directory that hostile names are written below.
//!
//! The kernel resolves every path as if the directory were `/` (`openat2`, `RESOLVE_IN_ROOT`): absolute links and `..` stay
//! inside, magic links are refused. The last component of a name is never followed. Behaviour: spec 09b §5.2.

use std::{
    ffi::OsStr,
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use rustix::{
    fs::{
        AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, RawDir, ResolveFlags, Stat, Timespec, Timestamps, Uid,
        XattrFlags,
    },
    io::Errno,
};

use crate::sys::spawn::Alone;

const IN_ROOT: ResolveFlags = ResolveFlags::IN_ROOT.union(ResolveFlags::NO_MAGICLINKS);
const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// Deepest tree that is deleted; deeper ones cannot be made by us.
const DEEPEST: usize = 4096;

/// The directory.
#[derive(Debug)]
pub struct RootDir {
    fd: OwnedFd,
}

/// How a name in a directory is told to a call that takes only paths.
#[derive(Clone, Copy, Debug)]
pub enum Way {
    /// By the directory's descriptor in `/proc`.
    Proc,
    /// By going there: for a process that may have no `/proc`, and of which only one thread names files.
    Here(Alone),
}

/// One component below an open directory.
#[derive(Debug, Clone, Copy)]
pub struct At<'a> {
    /// The directory.
    pub parent: BorrowedFd<'a>,
    /// The name in it.
    pub name: &'a OsStr,
}

impl RootDir {
    /// Opens it.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { fd: rustix::fs::openat(CWD, path, FOLDER, Mode::empty())? })
    }

    /// Its descriptor.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Opens what is there, links followed inside the root.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn resolve(&self, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
        let path = if path.is_empty() { b"." } else { path };
        for _ in 0..128 {
            let opened =
                rustix::fs::openat2(&self.fd, OsStr::from_bytes(path), flags | OFlags::CLOEXEC, Mode::empty(), IN_ROOT);
            match opened {
                // The kernel saw a rename somewhere while it walked and wants to be asked again.
                Err(Errno::AGAIN | Errno::INTR) => {}
                other => return other,
            }
        }
        Err(Errno::AGAIN)
    }

    /// The directory of these components, made where it is missing (mode 0755).
    ///
    /// # Errors
    /// `NOTDIR` where something on the way is no directory, else what the kernel says.
    pub fn folder(&self, parts: &[&[u8]]) -> Result<OwnedFd, Errno> {
        match self.resolve(&parts.join(&b'/'), FOLDER) {
            Err(Errno::NOENT) => {}
            other => return other,
        }
        for end in 1..=parts.len() {
            let (Some(so_far), Some(before)) = (parts.get(..end), parts.get(..end - 1)) else { continue };
            match self.resolve(&so_far.join(&b'/'), FOLDER) {
                Err(Errno::NOENT) => {
                    let parent = self.resolve(&before.join(&b'/'), FOLDER)?;
                    let name = OsStr::from_bytes(so_far.last().copied().unwrap_or_default());
                    make_folder(At { parent: parent.as_fd(), name }, 0o755)?;
                }
                other => drop(other?),
            }
        }
        self.resolve(&parts.join(&b'/'), FOLDER)
    }
}

impl At<'_> {
    /// What is there, itself; `None`: nothing.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn look(&self) -> Result<Option<Stat>, Errno> {
        match rustix::fs::statat(self.parent, self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(None),
            other => other.map(Some),
        }
    }

    /// Removes what is there, with all that is below it.
    ///
    /// # Errors
    /// What the kernel says; also where it is deeper than anything we make.
    pub fn remove(&self) -> io::Result<()> {
        remove_tree(self.parent, self.name)
    }

    /// Opens the directory that is there, never through a link.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn open_folder(&self) -> Result<OwnedFd, Errno> {
        rustix::fs::openat(self.parent, self.name, FOLDER | OFlags::NOFOLLOW, Mode::empty())
    }

    /// A path by which the kernel finds it without following it: for calls that know no `…at` form.
    pub fn path(&self) -> Vec<u8> {
        let mut path = format!("/proc/self/fd/{}/", self.parent.as_raw_fd()).into_bytes();
        path.extend_from_slice(self.name.as_bytes());
        path
    }

    /// Sets an extended attribute, never through a link.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn set_attribute(&self, way: Way, name: &[u8], value: &[u8]) -> Result<(), Errno> {
        let name = OsStr::from_bytes(name);
        match way {
            Way::Proc => rustix::fs::lsetxattr(OsStr::from_bytes(&self.path()), name, value, XattrFlags::empty()),
            Way::Here(_) => {
                rustix::process::fchdir(self.parent)?;
                rustix::fs::lsetxattr(self.name, name, value, XattrFlags::empty())
            }
        }
    }

    /// Sets the owner.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn set_owner(&self, uid: u32, gid: u32) -> Result<(), Errno> {
        let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
        rustix::fs::chownat(self.parent, self.name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)
    }

    /// Sets the permission bits of what is no link.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn set_mode(&self, mode: u32) -> Result<(), Errno> {
        // Nobody else writes here, and links were told apart before.
        rustix::fs::chmodat(self.parent, self.name, Mode::from_raw_mode(mode), AtFlags::empty())
    }

    /// Sets when it was read and written.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn set_times(&self, atime: (i64, u32), mtime: (i64, u32)) -> Result<(), Errno> {
        rustix::fs::utimensat(self.parent, self.name, &times(atime, mtime), AtFlags::SYMLINK_NOFOLLOW)
    }
}

/// A pair of times as the kernel takes them.
pub fn times(atime: (i64, u32), mtime: (i64, u32)) -> Timestamps {
    let spec = |(tv_sec, tv_nsec): (i64, u32)| Timespec { tv_sec, tv_nsec: tv_nsec.into() };
    Timestamps { last_access: spec(atime), last_modification: spec(mtime) }
}

/// Makes a directory with that mode whatever the umask.
///
/// # Errors
/// What the kernel says; one that is there already is good.
pub fn make_folder(at: At<'_>, mode: u32) -> Result<(), Errno> {
    match rustix::fs::mkdirat(at.parent, at.name, Mode::from_raw_mode(0o700)) {
        Err(Errno::EXIST) => Ok(()),
        Ok(()) => at.set_mode(mode),
        Err(error) => Err(error),
    }
}

/// Removes what `name` names in `parent`, whatever it is; nothing there is good.
///
/// Immutable and append-only flags are taken off.
///
/// # Errors
/// What the kernel says.
pub fn remove_tree(parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    if unlink(parent, name, AtFlags::empty())? {
        return Ok(());
    }
    // One directory is open at a time, whatever the archive's depth is: names lead down, `..` leads up again.
    let Some(mut folder) = open_or_gone(parent, name)? else { return Ok(()) };
    let mut own = name.to_owned();
    let mut above: Vec<(std::ffi::OsString, (u64, u64))> = Vec::new();
    loop {
        if let Some(next) = first_folder(&folder)? {
            if above.len() >= DEEPEST {
                return Err(io::Error::other("directories are nested too deeply"));
            }
            if let Some(opened) = open_or_gone(folder.as_fd(), &next)? {
                above.push((std::mem::replace(&mut own, next), identity(&folder)?));
                folder = opened;
            }
            continue;
        }
        let Some((name, expected)) = above.pop() else {
            return unlink(parent, &own, AtFlags::REMOVEDIR).map(drop);
        };
        let up = rustix::fs::openat(&folder, "..", FOLDER | OFlags::NOFOLLOW, Mode::empty())?;
        if identity(&up)? != expected {
            return Err(io::Error::other("a directory was moved while it was deleted"));
        }
        unlink(up.as_fd(), &own, AtFlags::REMOVEDIR)?;
        (folder, own) = (up, name);
    }
}

fn identity(folder: &OwnedFd) -> io::Result<(u64, u64)> {
    let stat = rustix::fs::fstat(folder)?;
    Ok((stat.st_dev, stat.st_ino))
}

fn open_or_gone(parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<Option<OwnedFd>> {
    match rustix::fs::openat(parent, name, FOLDER | OFlags::NOFOLLOW, Mode::empty()) {
        Err(Errno::NOENT) => Ok(None),
        other => Ok(Some(other?)),
    }
}

/// Removes everything but directories from a directory; the first directory, where there is one.
fn first_folder(folder: &OwnedFd) -> io::Result<Option<std::ffi::OsString>> {
    rustix::fs::seek(folder, rustix::fs::SeekFrom::Start(0))?;
    let mut buffer = Vec::with_capacity(16 << 10);
    let mut entries = RawDir::new(folder, buffer.spare_capacity_mut());
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name == "." || name == ".." {
            continue;
        }
        let is_folder = entry.file_type() == FileType::Directory;
        if is_folder || !unlink(folder.as_fd(), name, AtFlags::empty())? {
            return Ok(Some(name.to_owned()));
        }
    }
    Ok(None)
}

/// Whether it is gone; `false`: it is a directory.
fn unlink(parent: BorrowedFd<'_>, name: &OsStr, flags: AtFlags) -> io::Result<bool> {
    match rustix::fs::unlinkat(parent, name, flags) {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::ISDIR) if flags.is_empty() => Ok(false),
        Err(Errno::PERM) => {
            if flags.is_empty() && is_folder(parent, name) {
                return Ok(false);
            }
            clear_flags(parent, name);
            match rustix::fs::unlinkat(parent, name, flags) {
                Ok(()) | Err(Errno::NOENT) => Ok(true),
                Err(error) => Err(error.into()),
            }
        }
        Err(error) => Err(error.into()),
    }
}

fn is_folder(parent: BorrowedFd<'_>, name: &OsStr) -> bool {
    rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
}

/// Takes off what keeps a file or its directory from being changed; where it cannot, the removal says why.
fn clear_flags(parent: BorrowedFd<'_>, name: &OsStr) {
    let clear = |fd: BorrowedFd<'_>| {
        if let Ok(flags) = rustix::fs::ioctl_getflags(fd) {
            let kept = flags - rustix::fs::IFlags::IMMUTABLE - rustix::fs::IFlags::APPEND;
            // What it cannot take off is told by the removal that follows.
            let _ = rustix::fs::ioctl_setflags(fd, kept);
        }
    };
    clear(parent);
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    if let Ok(file) = rustix::fs::openat(parent, name, flags, Mode::empty()) {
        clear(file.as_fd());
    }
}

/// Names in a directory.
///
/// # Errors
/// What the kernel says.
pub fn names(folder: &OwnedFd) -> io::Result<Vec<std::ffi::OsString>> {
    let mut out = Vec::new();
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name != "." && name != ".." {
            out.push(name.to_owned());
        }
    }
    Ok(out)
}

/// Makes an empty file for writing that was not there before.
///
/// # Errors
/// What the kernel says.
pub fn create_file(at: At<'_>) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::openat(at.parent, at.name, flags, Mode::from_raw_mode(0o600))?))
}
