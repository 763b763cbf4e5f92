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
    mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags},
};

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

/// Makes the directories of `path` that are missing inside `root`, with that mode whatever the
/// umask, and returns the last as a path-only descriptor. What exists stays as it is.
///
/// # Errors
/// As [`open_inside`]; also where something on the way is no directory.
pub fn make_inside(root: &Path, path: &Path, mode: u32) -> io::Result<OwnedFd> {
    match open_inside(root, path, OFlags::PATH) {
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
    match rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(mode)) {
        // A container of the pod made it in the meantime.
        Ok(()) | Err(Errno::EXIST) => {}
        Err(e) => return Err(e.into()),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made = rustix::fs::openat(parent, name, flags, Mode::empty())?;
    rustix::fs::fchmod(&made, Mode::from_raw_mode(mode))?;
    Ok(made)
}

/// Binds what `path` names inside `root` to `target`, making directories that are missing. A bind
/// of the same file that is already there is kept; another one is replaced.
///
/// # Errors
/// As [`make_inside`], and whatever mounting says.
pub fn bind_inside(root: &Path, path: &Path, mode: u32, target: &Path) -> io::Result<()> {
    let source = make_inside(root, path, mode)?;
    let wanted = rustix::fs::fstat(&source)?;
    if let Ok(present) = rustix::fs::lstat(target) {
        if (present.st_dev, present.st_ino) == (wanted.st_dev, wanted.st_ino) {
            return Ok(());
        }
        unbind(target)?;
        remove(target)?;
    }
    let parent = target.parent().ok_or(io::ErrorKind::InvalidInput)?;
    DirBuilder::new().recursive(true).mode(HOLDER_MODE).create(parent)?;
    if FileType::from_raw_mode(wanted.st_mode) == FileType::Directory {
        DirBuilder::new().mode(HOLDER_MODE).create(target)?;
    } else {
        OpenOptions::new().write(true).create_new(true).mode(0o640).open(target)?;
    }
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    let tree = rustix::mount::open_tree(&source, "", flags)?;
    Ok(rustix::mount::move_mount(tree, "", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
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
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn missing_directories_are_made_with_the_mode_whatever_the_umask() {
        let volume = tempfile::tempdir().expect("a directory");
        make_inside(volume.path(), Path::new("a/b"), 0o777).expect("makeable");
        for path in ["a", "a/b"] {
            let mode = fs::metadata(volume.path().join(path)).expect("made").permissions().mode();
            assert_eq!(mode & 0o7777, 0o777, "{path}");
        }
        make_inside(volume.path(), Path::new("a/b"), 0o700).expect("there already");
        assert_eq!(fs::metadata(volume.path().join("a")).expect("made").permissions().mode() & 0o777, 0o777);
    }

    #[test]
    fn links_are_followed_inside_and_refused_outside() {
        let (volume, other) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
        let at = |name: &str| volume.path().join(name);
        fs::create_dir(at("real")).expect("makeable");
        symlink("real", at("inside")).expect("makeable");
        symlink(at("real"), at("absolute")).expect("makeable");
        symlink(other.path(), at("outside")).expect("makeable");
        symlink("../..", at("up")).expect("makeable");
        for good in ["inside/x", "absolute/y"] {
            make_inside(volume.path(), Path::new(good), 0o755).expect(good);
        }
        assert!(at("real/x").is_dir() && at("real/y").is_dir());
        for bad in ["outside/x", "outside", "up/etc", "up"] {
            let error = make_inside(volume.path(), Path::new(bad), 0o755).expect_err(bad);
            assert_eq!(error.raw_os_error(), Some(Errno::XDEV.raw_os_error()), "{bad}");
        }
        assert_eq!(fs::read_dir(other.path()).expect("listable").count(), 0);
    }

    #[test]
    fn a_file_on_the_way_is_an_error() {
        let volume = tempfile::tempdir().expect("a directory");
        fs::write(volume.path().join("file"), "x").expect("writable");
        assert!(make_inside(volume.path(), Path::new("file/x"), 0o755).is_err());
        make_inside(volume.path(), Path::new("file"), 0o755).expect("a file can be a sub-path");
    }

    #[test]
    fn binds_are_kept_replaced_and_undone() {
        let (volume, pod) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
        let at = |name: &str| volume.path().join(name);
        let target = pod.path().join("volume-subpaths/v/c/0");
        match bind_inside(volume.path(), Path::new("a"), 0o755, &target) {
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => return println!("skipped: needs root"),
            other => other.expect("bindable"),
        }
        fs::write(at("a/marker"), "x").expect("writable");
        bind_inside(volume.path(), Path::new("a"), 0o755, &target).expect("kept");
        assert!(target.join("marker").exists());
        fs::write(at("file"), "y").expect("writable");
        bind_inside(volume.path(), Path::new("file"), 0o755, &target).expect("replaced");
        assert_eq!(fs::read_to_string(&target).expect("readable"), "y");
        unbind(&target).expect("undone");
        assert!(at("a/marker").exists() && at("file").exists());
        unbind(&target).expect("nothing to do");
    }
}
