//! Race-free recursive removal of directory trees that containers built and may still modify.
//!
//! The only removal of trees in the program (clippy bans `std::fs::remove_dir_all`); it blocks. Every step is relative
//! to an open directory, no link is followed, a mount stops the removal, and after ascending the directory must be the
//! one that was left. Depth costs no stack and no descriptors, and has no limit. Immutable and append-only flags are
//! cleared.

use std::{
    ffi::{OsStr, OsString},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use rustix::{
    fs::{
        AtFlags, CWD, FileType, IFlags, Mode, OFlags, RawDir, SeekFrom, Stat, StatxAttributes, StatxFlags, fstat,
        ioctl_getflags, ioctl_setflags, openat, seek, statat, statx, unlinkat,
    },
    io::Errno,
};

const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC).union(OFlags::RDONLY);

/// Removes any file, link (not followed), or tree at the path; a missing path is success.
///
/// # Errors
/// The first entry that cannot be removed, or a mount point.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "path has no file name"));
    };
    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    match openat(CWD, parent, DIRECTORY.difference(OFlags::NOFOLLOW), Mode::empty()) {
        Ok(parent) => remove_tree_at(parent.as_fd(), name),
        Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Removes an entry of an open directory, with all below it; a missing entry is success.
///
/// # Errors
/// As [`remove_tree`].
pub fn remove_tree_at(parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    if unlink(parent, name)? == UnlinkResult::Gone {
        return Ok(());
    }
    let Some(mut here) = descend(parent, name)? else { return Ok(()) };
    let mut own = name.to_owned();
    // Names of the ancestors of `here` that are removed with it, and the identity of each.
    let mut above: Vec<(OsString, (u64, u64))> = Vec::new();
    loop {
        if let Some(next) = clear(&here)? {
            if let Some(below) = descend(here.as_fd(), &next)? {
                above.push((std::mem::replace(&mut own, next), identity(&fstat(&here)?)));
                here = below;
            }
            continue;
        }
        let Some((name, expected)) = above.pop() else { return remove_directory(parent, &own) };
        let up = openat(&here, "..", DIRECTORY, Mode::empty())?;
        if identity(&fstat(&up)?) != expected {
            return Err(io::Error::other("a directory was moved while it was being removed"));
        }
        remove_directory(up.as_fd(), &own)?;
        (here, own) = (up, name);
    }
}

/// Removes an empty directory; a missing one is success.
///
/// # Errors
/// If it is not empty or cannot be removed.
pub fn remove_empty_directory(path: &Path) -> io::Result<()> {
    match unlinkat(CWD, path, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Removes all non-directories of a directory; returns the name of one remaining subdirectory.
fn clear(here: &OwnedFd) -> io::Result<Option<OsString>> {
    seek(here, SeekFrom::Start(0))?;
    let mut buffer = Vec::with_capacity(16 << 10);
    let mut entries = RawDir::new(here, buffer.spare_capacity_mut());
    while let Some(entry) = entries.next() {
        let entry = match entry {
            // The directory was removed concurrently: it is empty.
            Err(Errno::NOENT) => return Ok(None),
            other => other?,
        };
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name == "." || name == ".." {
            continue;
        }
        if entry.file_type() == FileType::Directory || unlink(here.as_fd(), name)? == UnlinkResult::IsDirectory {
            return Ok(Some(name.to_owned()));
        }
    }
    Ok(None)
}

#[derive(PartialEq, Eq)]
enum UnlinkResult {
    Gone,
    IsDirectory,
}

fn unlink(parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<UnlinkResult> {
    match unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(UnlinkResult::Gone),
        Err(Errno::ISDIR) => Ok(UnlinkResult::IsDirectory),
        // POSIX' errno for a directory, and the kernel's for an immutable file.
        Err(Errno::PERM) if is_directory(parent, name) => Ok(UnlinkResult::IsDirectory),
        Err(Errno::PERM) => {
            clear_flags(parent, name);
            match unlinkat(parent, name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => Ok(UnlinkResult::Gone),
                Err(error) => Err(error.into()),
            }
        }
        Err(error) => Err(error.into()),
    }
}

fn remove_directory(parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    match unlinkat(parent, name, AtFlags::REMOVEDIR) {
        Err(Errno::PERM) => {
            clear_flags(parent, name);
            match unlinkat(parent, name, AtFlags::REMOVEDIR) {
                Ok(()) | Err(Errno::NOENT) => Ok(()),
                Err(error) => Err(error.into()),
            }
        }
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn is_directory(parent: BorrowedFd<'_>, name: &OsStr) -> bool {
    statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
}

/// Clears the immutable and append-only flags of an entry and its parent; a failure surfaces in the removal's error.
fn clear_flags(parent: BorrowedFd<'_>, name: &OsStr) {
    let clear = |fd: BorrowedFd<'_>| {
        if let Ok(flags) = ioctl_getflags(fd) {
            let _ = ioctl_setflags(fd, flags - IFlags::IMMUTABLE - IFlags::APPEND); // the removal then fails
        }
    };
    clear(parent);
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    if let Ok(file) = openat(parent, name, flags, Mode::empty()) {
        clear(file.as_fd());
    }
}

/// Opens a subdirectory; `None` if it is gone. Refuses a mount point.
fn descend(parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<Option<OwnedFd>> {
    let below = match openat(parent, name, DIRECTORY, Mode::empty()) {
        Ok(below) => below,
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let crosses = match statx(&below, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS) {
        Ok(found) if found.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT) => {
            found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)
        }
        _ => fstat(&below)?.st_dev != fstat(parent)?.st_dev,
    };
    if crosses {
        let text = format!("cannot delete directory {}: it is a mount point", name.to_string_lossy());
        return Err(io::Error::new(io::ErrorKind::ResourceBusy, text));
    }
    Ok(Some(below))
}

#[allow(clippy::useless_conversion, reason = "the types of both members differ between architectures")]
fn identity(stat: &Stat) -> (u64, u64) {
    (stat.st_dev.into(), stat.st_ino.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::symlink};

    #[test]
    fn a_tree_goes_and_what_its_links_point_to_stays() {
        let dir = tempfile::tempdir().expect("a directory");
        let (root, outside) = (dir.path().join("root"), dir.path().join("outside"));
        fs::create_dir_all(root.join("a/b/c")).expect("directories");
        fs::create_dir(&outside).expect("a directory");
        fs::write(outside.join("keep"), "x").expect("a file");
        symlink(&outside, root.join("a/link")).expect("a link");
        symlink(outside.join("keep"), root.join("file-link")).expect("a link");
        symlink("..", root.join("a/b/up")).expect("a link");
        for i in 0..300 {
            fs::write(root.join(format!("a/b/{i}")), "x").expect("a file");
        }
        remove_tree(&root).expect("removed");
        assert!(!root.exists() && outside.join("keep").exists());
        remove_tree(&root).expect("again");
        remove_tree(&dir.path().join("no/such/parent")).expect("nothing there");
    }

    #[test]
    fn a_link_in_place_of_the_tree_is_removed_itself() {
        let dir = tempfile::tempdir().expect("a directory");
        let outside = dir.path().join("outside");
        fs::create_dir(&outside).expect("a directory");
        symlink(&outside, dir.path().join("root")).expect("a link");
        remove_tree(&dir.path().join("root")).expect("removed");
        assert!(outside.exists());
    }

    /// Twenty thousand levels on a thread with a small stack: no limit, no recursion, no path.
    #[test]
    fn depth_costs_nothing() {
        let dir = tempfile::tempdir().expect("a directory");
        let root = dir.path().join("root");
        fs::create_dir(&root).expect("a directory");
        let mut here = openat(CWD, &root, DIRECTORY, Mode::empty()).expect("open");
        for _ in 0..20_000 {
            rustix::fs::mkdirat(&here, "d", Mode::RWXU).expect("a directory");
            here = openat(&here, "d", DIRECTORY, Mode::empty()).expect("open");
        }
        drop(here);
        let path = root.clone();
        let removing = std::thread::Builder::new().stack_size(64 << 10).spawn(move || remove_tree(&path));
        removing.expect("a thread").join().expect("no overflow").expect("removed");
        assert!(!root.exists());
    }

    #[test]
    fn only_empty_directories_go_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        fs::create_dir_all(dir.path().join("a/b")).expect("directories");
        assert!(remove_empty_directory(&dir.path().join("a")).is_err());
        remove_empty_directory(&dir.path().join("a/b")).expect("removed");
        remove_empty_directory(&dir.path().join("a/b")).expect("nothing there");
    }
}
