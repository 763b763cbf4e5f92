//! Root directory of a layer, below which untrusted names are created.
//!
//! The kernel resolves every path as if the directory were `/` (`openat2`, `RESOLVE_IN_ROOT`): absolute links and `..`
//! stay inside, magic links are refused. The last component of a name is never followed. Implements spec 09b §5.2.

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
    fs::{AtFlags, CWD, Dir, Gid, Mode, OFlags, ResolveFlags, Stat, Timespec, Timestamps, Uid, XattrFlags},
    io::Errno,
};

use berth_sys::{child_process::SingleThreaded, tree_removal::remove_tree_at};

const IN_ROOT: ResolveFlags = ResolveFlags::IN_ROOT.union(ResolveFlags::NO_MAGICLINKS);
const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// The open root directory.
#[derive(Debug)]
pub struct RootDir {
    fd: OwnedFd,
}

/// How a name in a directory is passed to a system call that takes only paths.
#[derive(Clone, Copy, Debug)]
pub enum PathMode {
    /// By the directory's descriptor in `/proc`.
    Proc,
    /// By `fchdir`: for a process without `/proc`, in which only one thread resolves names.
    Fchdir(SingleThreaded),
}

/// A name in an open directory.
#[derive(Debug, Clone, Copy)]
pub struct NameInDirectory<'a> {
    /// The directory.
    pub parent: BorrowedFd<'a>,
    /// The name, one component.
    pub name: &'a OsStr,
}

impl RootDir {
    /// Opens the directory.
    ///
    /// # Errors
    /// The error of `openat`.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { fd: rustix::fs::openat(CWD, path, FOLDER, Mode::empty())? })
    }

    /// The directory's descriptor.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Opens an existing path, following links inside the root.
    ///
    /// # Errors
    /// The error of `openat2`.
    pub fn resolve(&self, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
        let path = if path.is_empty() { b"." } else { path };
        for _ in 0..128 {
            let opened =
                rustix::fs::openat2(&self.fd, OsStr::from_bytes(path), flags | OFlags::CLOEXEC, Mode::empty(), IN_ROOT);
            match opened {
                // EAGAIN: a rename raced with the path walk.
                Err(Errno::AGAIN | Errno::INTR) => {}
                other => return other,
            }
        }
        Err(Errno::AGAIN)
    }

    /// Opens the directory with these components; creates missing ones with mode 0755.
    ///
    /// # Errors
    /// `NOTDIR` if a component is no directory; otherwise the error of the system call.
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
                    make_folder(NameInDirectory { parent: parent.as_fd(), name }, 0o755)?;
                }
                other => drop(other?),
            }
        }
        self.resolve(&parts.join(&b'/'), FOLDER)
    }
}

impl NameInDirectory<'_> {
    /// Status of the name itself, not following links; `None` if it does not exist.
    ///
    /// # Errors
    /// The error of `fstatat`.
    pub fn stat(&self) -> Result<Option<Stat>, Errno> {
        match rustix::fs::statat(self.parent, self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(None),
            other => other.map(Some),
        }
    }

    /// Removes the name recursively.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn remove(&self) -> io::Result<()> {
        remove_tree_at(self.parent, self.name)
    }

    /// Opens the name as a directory, not following a link.
    ///
    /// # Errors
    /// The error of `openat`.
    pub fn open_folder(&self) -> Result<OwnedFd, Errno> {
        rustix::fs::openat(self.parent, self.name, FOLDER | OFlags::NOFOLLOW, Mode::empty())
    }

    /// A `/proc/self/fd` path of the name, for system calls without an `…at` form.
    pub fn path(&self) -> Vec<u8> {
        let mut path = format!("/proc/self/fd/{}/", self.parent.as_raw_fd()).into_bytes();
        path.extend_from_slice(self.name.as_bytes());
        path
    }

    /// Sets an extended attribute, not following a link.
    ///
    /// # Errors
    /// The error of `lsetxattr` or `fchdir`.
    pub fn set_attribute(&self, way: PathMode, name: &[u8], value: &[u8]) -> Result<(), Errno> {
        let name = OsStr::from_bytes(name);
        match way {
            PathMode::Proc => rustix::fs::lsetxattr(OsStr::from_bytes(&self.path()), name, value, XattrFlags::empty()),
            PathMode::Fchdir(_) => {
                rustix::process::fchdir(self.parent)?;
                rustix::fs::lsetxattr(self.name, name, value, XattrFlags::empty())
            }
        }
    }

    /// Sets the owner, not following a link.
    ///
    /// # Errors
    /// The error of `fchownat`.
    pub fn set_owner(&self, uid: u32, gid: u32) -> Result<(), Errno> {
        let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
        rustix::fs::chownat(self.parent, self.name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)
    }

    /// Sets the mode; the name must not be a symbolic link.
    ///
    /// # Errors
    /// The error of `fchmodat`.
    pub fn set_mode(&self, mode: u32) -> Result<(), Errno> {
        // Nothing else writes here, and callers skip symbolic links.
        rustix::fs::chmodat(self.parent, self.name, Mode::from_raw_mode(mode), AtFlags::empty())
    }

    /// Sets access and modification time, not following a link.
    ///
    /// # Errors
    /// The error of `utimensat`.
    pub fn set_times(&self, atime: (i64, u32), mtime: (i64, u32)) -> Result<(), Errno> {
        rustix::fs::utimensat(self.parent, self.name, &times(atime, mtime), AtFlags::SYMLINK_NOFOLLOW)
    }
}

/// Access and modification time for `utimensat`.
pub fn times(atime: (i64, u32), mtime: (i64, u32)) -> Timestamps {
    let spec = |(tv_sec, tv_nsec): (i64, u32)| Timespec { tv_sec, tv_nsec: tv_nsec.into() };
    Timestamps { last_access: spec(atime), last_modification: spec(mtime) }
}

/// Creates a directory with this mode, independent of the umask; succeeds without change if it exists.
///
/// # Errors
/// The error of `mkdirat` or `fchmodat`.
pub fn make_folder(at: NameInDirectory<'_>, mode: u32) -> Result<(), Errno> {
    match rustix::fs::mkdirat(at.parent, at.name, Mode::from_raw_mode(0o700)) {
        Err(Errno::EXIST) => Ok(()),
        Ok(()) => at.set_mode(mode),
        Err(error) => Err(error),
    }
}

/// Names in a directory, without `.` and `..`.
///
/// # Errors
/// The error of the system call.
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

/// Creates a new file for writing, mode 0600.
///
/// # Errors
/// The error of `openat`; `EEXIST` if the name exists.
pub fn create_file(at: NameInDirectory<'_>) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::openat(at.parent, at.name, flags, Mode::from_raw_mode(0o600))?))
}
