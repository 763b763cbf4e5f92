//! subPath volumes: race-free resolution, creation, and bind mounts inside a volume.
//!
//! A container may own the volume and replace directories by links at any moment, so a path is never checked and then
//! used: the kernel resolves it below the volume's descriptor (`openat2`, `RESOLVE_BENEATH`), and the resulting
//! descriptor is bind-mounted. Blocking: call it from the blocking pool.
//! Implements spec 03a §6.3, 07 (`volume-subpaths`).

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

/// Mode of the directories that contain the bind mounts.
const HOLDER_MODE: u32 = 0o750;
/// Maximum number of bind mounts stacked on one target; more indicates another problem.
const STACKED: usize = 16;

/// Opens `path` inside `root` with the given flags; follows links that stay inside.
///
/// # Errors
/// `EXDEV` for a path that leads outside, and any error of opening.
pub fn open_inside(root: &Path, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let volume = open_root(root)?;
    match beneath(&volume, path, flags) {
        // An absolute link may still lead to a place inside, by the host's own path of it.
        Err(Errno::XDEV) => {
            let (root, real) = (fs::canonicalize(root)?, fs::canonicalize(root.join(path))?);
            let inside = real.strip_prefix(&root).map_err(|_| io::Error::from(Errno::XDEV))?;
            Ok(beneath(&volume, inside, flags)?)
        }
        other => Ok(other?),
    }
}

/// Opens `path` inside `root` as an `O_PATH` descriptor, and triggers automounts.
///
/// # Errors
/// As [`open_inside`].
pub fn find_inside(root: &Path, path: &Path) -> io::Result<OwnedFd> {
    // Opening with O_DIRECTORY makes the kernel mount an automount point.
    match open_inside(root, path, OFlags::PATH | OFlags::DIRECTORY) {
        Err(e) if e.kind() == io::ErrorKind::NotADirectory => open_inside(root, path, OFlags::PATH),
        other => other,
    }
}

/// Creates the missing directories of `path` inside `root`, with that mode regardless of the umask, and returns the
/// last one as a descriptor. Existing directories are unchanged.
///
/// # Errors
/// As [`open_inside`]; also if a component is not a directory.
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
        // A container of the pod created it concurrently: its mode is left unchanged.
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

/// Bind-mounts the target of an open descriptor on `target`; no path of the source is resolved again. An existing bind
/// mount of the same file is kept; another one is replaced. A failure leaves no bind mount, and none of the directories
/// it created.
///
/// # Errors
/// Any error of mounting.
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
        // Only empty directories: bind mounts of other containers keep theirs.
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
            // The kernel detected a concurrent rename and requests a retry.
            Err(Errno::AGAIN | Errno::INTR) => {}
            other => return other,
        }
    }
}

fn unbind(target: &Path) -> io::Result<()> {
    for _ in 0..STACKED {
        match rustix::mount::unmount(target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            // Not a mount point (any more).
            Err(Errno::INVAL | Errno::NOENT) => return Ok(()),
            Err(e) => return Err(e.into()),
        }
    }
    Err(io::Error::other(format!("{}: more than {STACKED} mounts stacked", target.display())))
}

/// Deletes an empty directory or a file; a directory with content is an error.
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
