//! Sub-paths of volumes: found, made and bound without ever leaving the volume.
//!
//! A container may own the volume and swap directories for links at any moment, so a path is
//! never checked and then used: the kernel resolves it below the volume's descriptor
//! (`openat2`, `RESOLVE_BENEATH`), and what is bound is the descriptor that came out. Blocking:
//! call it from the blocking pool. Behaviour: spec 03a §6.3, 07 (`volume-subpaths`).

use std::{
    ffi::OsStr,
    fs::{self, DirBuilder, OpenOptions},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{DirBuilderExt, OpenOptionsExt},
    },
    path::{Component, Path},
};

use rustix::{
    fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags},
    io::Errno,
    mount::UnmountFlags,
};

use super::mount;

/// Mode of the directories that hold the binds.
const HOLDER_MODE: u32 = 0o750;
/// Binds that may be stacked on one place; more means that something else is wrong.
const STACKED: usize = 16;

/// Opens what `path` names inside `root` with the given flags; links are followed as long as they
/// stay inside.
///
/// # Errors
/// `EXDEV` for a path that leads outside, and whatever opening says.
pub fn open_inside(root: &Path, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let volume = open_root(root)?;
    match beneath(&volume, path, flags) {
        // An absolute link may still lead to a place inside, by the host's own name for it.
        Err(Errno::XDEV) => {
            let (root, real) = (fs::canonicalize(root)?, fs::canonicalize(root.join(path))?);
            let inside = real.strip_prefix(&root).map_err(|_| io::Error::from(Errno::XDEV))?;
            Ok(beneath(&volume, inside, flags)?)
        }
        other => Ok(other?),
    }
}

/// Opens what `path` names inside `root` as a path-only descriptor: what is there, or is mounted there when somebody
/// looks.
///
/// # Errors
/// As [`open_inside`].
pub fn find_inside(root: &Path, path: &Path) -> io::Result<OwnedFd> {
    // Asking for a directory is what makes the kernel mount what is mounted on demand.
    match open_inside(root, path, OFlags::PATH | OFlags::DIRECTORY) {
        Err(e) if e.kind() == io::ErrorKind::NotADirectory => open_inside(root, path, OFlags::PATH),
        other => other,
    }
}

/// Makes the directories of `path` that are missing inside `root`, with that mode whatever the
/// umask, and returns the last as a path-only descriptor. What exists stays as it is.
///
/// # Errors
/// As [`open_inside`]; also where something on the way is no directory.
pub fn make_inside(root: &Path, path: &Path, mode: u32) -> io::Result<OwnedFd> {
    match find_inside(root, path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        other => return other,
    }
    let mut at = open_root(root)?;
    let mut so_far = std::path::PathBuf::new();
    for component in path.components() {
        let Component::Normal(name) = component else { continue };
        so_far.push(name);
        at = match open_inside(root, &so_far, OFlags::PATH | OFlags::DIRECTORY) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => make_one(&at, name, mode)?,
            other => other?,
        };
    }
    Ok(at)
}

fn make_one(parent: &OwnedFd, name: &OsStr, mode: u32) -> io::Result<OwnedFd> {
    let is_ours = match rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(mode)) {
        Ok(()) => true,
        // A container of the pod made it in the meantime: its mode is its own.
        Err(Errno::EXIST) => false,
        Err(e) => return Err(e.into()),
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made = rustix::fs::openat(parent, name, flags, Mode::empty())?;
    if is_ours {
        rustix::fs::fchmod(&made, Mode::from_raw_mode(mode))?;
    }
    Ok(made)
}

/// Binds what an open descriptor leads to on `target`; nothing is resolved again. A bind of the same file that is
/// already there is kept; another one is replaced. What fails leaves no bind, and none of the directories it made.
///
/// # Errors
/// Whatever mounting says.
pub fn bind_opened(source: &OwnedFd, holder: &Path, target: &Path) -> io::Result<()> {
    let wanted = rustix::fs::fstat(source)?;
    if let Ok(present) = rustix::fs::lstat(target) {
        if (present.st_dev, present.st_ino) == (wanted.st_dev, wanted.st_ino) {
            return Ok(());
        }
        unbind(target)?;
        remove(target)?;
    }
    let attempt = || -> io::Result<()> {
        let parent = target.parent().ok_or(io::ErrorKind::InvalidInput)?;
        DirBuilder::new().recursive(true).mode(HOLDER_MODE).create(parent)?;
        if FileType::from_raw_mode(wanted.st_mode) == FileType::Directory {
            DirBuilder::new().mode(HOLDER_MODE).create(target)?;
        } else {
            OpenOptions::new().write(true).create_new(true).mode(0o640).open(target)?;
        }
        mount::bind(source, target, &[])
    };
    attempt().inspect_err(|_| {
        // Empty ones only: binds of other containers keep theirs.
        let mut made = Some(target);
        while let Some(path) = made.filter(|path| path.starts_with(holder)) {
            if remove(path).is_err() {
                break;
            }
            made = path.parent();
        }
    })
}

fn open_root(root: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(CWD, root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

fn beneath(root: &impl AsFd, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    loop {
        match rustix::fs::openat2(root, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve) {
            // The kernel saw a rename while it walked and wants to be asked again.
            Err(Errno::AGAIN | Errno::INTR) => {}
            other => return other,
        }
    }
}

fn unbind(target: &Path) -> io::Result<()> {
    for _ in 0..STACKED {
        match rustix::mount::unmount(target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            // Not a mount (any more).
            Err(Errno::INVAL | Errno::NOENT) => return Ok(()),
            Err(e) => return Err(e.into()),
        }
    }
    Err(io::Error::other(format!("{}: more than {STACKED} mounts stacked", target.display())))
}

/// Removes an empty directory or a file, and nothing that has content.
fn remove(target: &Path) -> io::Result<()> {
    match rustix::fs::unlinkat(CWD, target, AtFlags::REMOVEDIR) {
        Err(Errno::NOTDIR) => ignore_missing(fs::remove_file(target)),
        other => ignore_missing(other.map_err(Into::into)),
    }
}

fn ignore_missing(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests;
