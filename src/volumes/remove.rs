//! Removes a tree without ever leaving it. Blocking.
//!
//! Whoever owned the tree may have put links and mounts into it, and may still change it while it
//! is removed. So every step is relative to an open directory, no link is followed, a mount ends
//! the work, and after going back up the directory must be the one that was left. Depth costs no
//! stack and no file descriptors.

use std::{
    ffi::{CString, OsStr},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, StatxAttributes, StatxFlags, fstat, openat, statat, statx,
    unlinkat,
};

const OPEN: OFlags = OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC).union(OFlags::RDONLY);

/// Removes whatever is at the path; nothing there is fine.
///
/// # Errors
/// For the first entry that cannot be removed, and for a mount.
pub fn tree(path: &Path) -> io::Result<()> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a path of an entry"));
    };
    let parent = match openat(CWD, parent, OPEN.difference(OFlags::NOFOLLOW), Mode::empty()) {
        Ok(parent) => parent,
        Err(rustix::io::Errno::NOENT) => return Ok(()),
        Err(e) => return Err(e.into()),
    };
    entry(&parent, name)
}

/// Removes an entry of an open directory, with all below it.
fn entry(parent: &OwnedFd, name: &OsStr) -> io::Result<()> {
    let stat = match statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => stat,
        Err(rustix::io::Errno::NOENT) => return Ok(()),
        Err(e) => return Err(e.into()),
    };
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return gone(unlinkat(parent, name, AtFlags::empty()));
    }
    let mut here = descend(parent.as_fd(), name)?;
    // Names of the directories between the first one and `here`, with the identity of their parents.
    let mut above: Vec<(CString, (u64, u64))> = Vec::new();
    loop {
        match clear(&here)? {
            Some(directory) => {
                let id = identity(&fstat(&here)?);
                let below = descend(here.as_fd(), OsStr::from_bytes(directory.as_bytes()))?;
                above.push((directory, id));
                here = below;
            }
            None => match above.pop() {
                Some((name, id)) => {
                    let up = openat(&here, "..", OPEN, Mode::empty())?;
                    if identity(&fstat(&up)?) != id {
                        return Err(io::Error::other("a directory was moved while it was being removed"));
                    }
                    gone(unlinkat(&up, &name, AtFlags::REMOVEDIR))?;
                    here = up;
                }
                None => return gone(unlinkat(parent, name, AtFlags::REMOVEDIR)),
            },
        }
    }
}

/// Removes what is no directory, and names one directory that is left.
fn clear(here: &OwnedFd) -> io::Result<Option<CString>> {
    let mut entries = Dir::read_from(here)?;
    while let Some(entry) = entries.read() {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let kind = match entry.file_type() {
            FileType::Unknown => FileType::from_raw_mode(statat(here, name, AtFlags::SYMLINK_NOFOLLOW)?.st_mode),
            known => known,
        };
        if kind == FileType::Directory {
            return Ok(Some(name.to_owned()));
        }
        gone(unlinkat(here, name, AtFlags::empty()))?;
    }
    Ok(None)
}

/// Opens a directory below; refuses the root of a mount.
fn descend(parent: impl AsFd, name: &OsStr) -> io::Result<OwnedFd> {
    let parent = parent.as_fd();
    let below = openat(parent, name, OPEN, Mode::empty())?;
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
    Ok(below)
}

#[allow(clippy::useless_conversion, reason = "the types of both members differ between architectures")]
fn identity(stat: &Stat) -> (u64, u64) {
    (stat.st_dev.into(), stat.st_ino.into())
}

fn gone(removed: rustix::io::Result<()>) -> io::Result<()> {
    match removed {
        Ok(()) | Err(rustix::io::Errno::NOENT) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Removes a directory if it is empty; nothing there is fine.
///
/// # Errors
/// If it is not empty or cannot be removed.
pub fn empty_directory(path: &Path) -> io::Result<()> {
    gone(unlinkat(CWD, path, AtFlags::REMOVEDIR))
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
        tree(&root).expect("removed");
        assert!(!root.exists() && outside.join("keep").exists());
        tree(&root).expect("again");
        tree(&dir.path().join("no/such/parent")).expect("nothing there");
    }

    #[test]
    fn a_link_in_place_of_the_tree_is_removed_itself() {
        let dir = tempfile::tempdir().expect("a directory");
        let outside = dir.path().join("outside");
        fs::create_dir(&outside).expect("a directory");
        symlink(&outside, dir.path().join("root")).expect("a link");
        tree(&dir.path().join("root")).expect("removed");
        assert!(outside.exists());
    }

    #[test]
    fn depth_costs_nothing() {
        let dir = tempfile::tempdir().expect("a directory");
        let root = dir.path().join("root");
        fs::create_dir(&root).expect("a directory");
        let mut here = openat(CWD, &root, OPEN, Mode::empty()).expect("open");
        for _ in 0..1100 {
            rustix::fs::mkdirat(&here, "d", Mode::RWXU).expect("a directory");
            here = openat(&here, "d", OPEN, Mode::empty()).expect("open");
        }
        drop(here);
        tree(&root).expect("removed");
        assert!(!root.exists());
    }

    #[test]
    fn only_empty_directories_go_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        fs::create_dir_all(dir.path().join("a/b")).expect("directories");
        assert!(empty_directory(&dir.path().join("a")).is_err());
        empty_directory(&dir.path().join("a/b")).expect("removed");
        empty_directory(&dir.path().join("a/b")).expect("nothing there");
    }
}
