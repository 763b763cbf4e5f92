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
    fs::{AtFlags, CWD, Dir, Gid, Mode, OFlags, ResolveFlags, Stat, Timespec, Timestamps, Uid, XattrFlags},
    io::Errno,
};

use berth_sys::{remove_tree::remove_tree_at, spawn::Alone};

const IN_ROOT: ResolveFlags = ResolveFlags::IN_ROOT.union(ResolveFlags::NO_MAGICLINKS);
const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

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
    /// What the kernel says.
    pub fn remove(&self) -> io::Result<()> {
        remove_tree_at(self.parent, self.name)
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
