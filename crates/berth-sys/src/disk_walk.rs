//! Disk usage of directory trees that containers own and may modify concurrently (like `du`).
//!
//! The only such walk in the program; it blocks. It has one directory open at a time: names lead down, `..` leads up
//! again, so depth costs no descriptors, no stack, and no path. It follows no link and enters no other file system.
//! What it cannot count is an error, never omitted silently.

use std::{
    collections::HashSet,
    ffi::{CStr, CString},
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use rustix::{
    fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, fstat, openat, statat},
    io::Errno,
};

/// Maximum memory for names of directories not yet walked, bytes: about 700,000 names.
const MAX_PENDING: usize = 32 << 20;
/// Memory of a pending name besides its bytes.
const PER_NAME: usize = 40;
/// Maximum number of hard-linked files remembered.
const MAX_LINKS: usize = 1 << 20;
/// Unit of `st_blocks`, bytes, independent of the file system's block size.
const BLOCK: u64 = 512;

/// Disk usage of files.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Bytes on disk, in whole blocks.
    pub bytes: u64,
    /// Number of inodes.
    pub inodes: u64,
}

impl Usage {
    /// Adds one inode with its blocks.
    pub fn add(&mut self, stat: &Stat) {
        self.bytes = self.bytes.saturating_add(u64::try_from(stat.st_blocks).unwrap_or_default().saturating_mul(BLOCK));
        self.inodes = self.inodes.saturating_add(1);
    }
}

/// Disk usage of a directory tree, as `du` counts: hard-linked files once, nothing on other file systems. Entries that
/// disappear during the walk may or may not count. `pace` is called for each entry: it may sleep, or end the walk.
///
/// # Errors
/// If a directory cannot be read or was moved meanwhile, too many directories are pending, or `pace` ends the walk.
pub fn count(directory: &Path, mut pace: impl FnMut() -> io::Result<()>) -> io::Result<Usage> {
    let mut here = open(CWD, directory)?;
    let top = fstat(&here)?;
    let mut walk = Walk { device: top.st_dev, usage: Usage::default(), links: HashSet::new(), pending: 0 };
    walk.usage.add(&top);
    let mut above = vec![walk.read(&here, &mut pace)?];
    loop {
        let Some(level) = above.last_mut() else { return Ok(walk.usage) };
        if let Some(name) = level.names.pop() {
            walk.pending -= name.as_bytes().len() + PER_NAME;
            match open(&here, name.as_c_str()) {
                // The name may refer to a mount by now.
                Ok(below) if fstat(&below)?.st_dev == walk.device => {
                    here = below;
                    above.push(walk.read(&here, &mut pace)?);
                }
                Ok(_) => {}
                // Deleted, or no longer a directory.
                Err(error) if is_gone(&error) => {}
                Err(error) => return Err(error),
            }
            continue;
        }
        above.pop();
        let Some(level) = above.last() else { continue };
        here = open(&here, c"..")?;
        if identity(&fstat(&here)?) != level.identity {
            return Err(io::Error::other("a directory was moved while it was being counted"));
        }
    }
}

/// Disk usage of the files directly in a directory, without subdirectories.
///
/// # Errors
/// If the directory cannot be read, or `pace` ends the walk.
pub fn count_files(directory: &Path, mut pace: impl FnMut() -> io::Result<()>) -> io::Result<Usage> {
    let here = open(CWD, directory)?;
    let mut walk = Walk { device: fstat(&here)?.st_dev, usage: Usage::default(), links: HashSet::new(), pending: 0 };
    for entry in Dir::read_from(&here)? {
        let entry = entry?;
        pace()?;
        if let Some(stat) = stat_entry(&here, entry.file_name())?
            && !FileType::from_raw_mode(stat.st_mode).is_dir()
            && walk.is_first(&stat)?
        {
            walk.usage.add(&stat);
        }
    }
    Ok(walk.usage)
}

/// Disk usage of one file; does not follow a link.
///
/// # Errors
/// If `stat` fails.
pub fn count_file(path: &Path) -> io::Result<Usage> {
    let mut usage = Usage::default();
    usage.add(&statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW)?);
    Ok(usage)
}

/// An ancestor of the open directory, or the open directory itself.
struct DirectoryLevel {
    identity: (u64, u64),
    /// Subdirectories that are still to be walked.
    names: Vec<CString>,
}

struct Walk {
    device: u64,
    usage: Usage,
    links: HashSet<u64>,
    /// Memory of all pending names, bytes.
    pending: usize,
}

impl Walk {
    /// Counts the entries of a directory.
    fn read(&mut self, here: &OwnedFd, pace: &mut impl FnMut() -> io::Result<()>) -> io::Result<DirectoryLevel> {
        let mut level = DirectoryLevel { identity: identity(&fstat(here)?), names: Vec::new() };
        let entries = match Dir::read_from(here) {
            // Removed since it was opened: it is empty.
            Err(Errno::NOENT) => return Ok(level),
            other => other?,
        };
        for entry in entries {
            let entry = match entry {
                Err(Errno::NOENT) => break,
                other => other?,
            };
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            pace()?;
            let Some(stat) = stat_entry(here, name)? else { continue };
            if !FileType::from_raw_mode(stat.st_mode).is_dir() {
                if self.is_first(&stat)? {
                    self.usage.add(&stat);
                }
            } else if stat.st_dev == self.device {
                self.usage.add(&stat);
                self.pending += name.to_bytes().len() + PER_NAME;
                if self.pending > MAX_PENDING {
                    return Err(io::Error::other("too many directories to count"));
                }
                level.names.push(name.to_owned());
            }
        }
        Ok(level)
    }

    /// Whether a hard-linked file is encountered for the first time.
    fn is_first(&mut self, stat: &Stat) -> io::Result<bool> {
        if stat.st_nlink <= 1 {
            return Ok(true);
        }
        if self.links.len() >= MAX_LINKS {
            return Err(io::Error::other("too many hard-linked files to count"));
        }
        Ok(self.links.insert(stat.st_ino))
    }
}

#[allow(clippy::useless_conversion, reason = "the types of both members differ between architectures")]
fn identity(stat: &Stat) -> (u64, u64) {
    (stat.st_dev.into(), stat.st_ino.into())
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
        || error.raw_os_error() == Some(Errno::LOOP.raw_os_error())
}

fn open(at: impl AsFd, name: impl rustix::path::Arg) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    Ok(openat(at, name, flags, Mode::empty())?)
}

/// Stats an entry; `None` if it disappeared.
fn stat_entry(directory: &OwnedFd, name: &CStr) -> io::Result<Option<Stat>> {
    match statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    fn go_on() -> io::Result<()> {
        Ok(())
    }

    /// No path reaches the deepest directory.
    #[test]
    fn depth_hides_nothing() {
        let root = tempfile::tempdir().expect("a directory");
        let mut here = open(CWD, root.path()).expect("open");
        for _ in 0..6000 {
            rustix::fs::mkdirat(&here, "directory", Mode::RWXU).expect("made");
            here = open(&here, c"directory").expect("open");
        }
        let flags = OFlags::CREATE | OFlags::WRONLY;
        let file = openat(&here, "deep", flags, Mode::RUSR).expect("made");
        rustix::io::write(&file, &[1; 1 << 16]).expect("written");
        let usage = count(root.path(), go_on).expect("counted");
        assert_eq!(usage.inodes, 6002);
        assert!(usage.bytes >= 1 << 16);
        crate::tree_removal::remove_tree(&root.path().join("directory")).expect("removed");
    }

    /// A comb of directories, each with something below it.
    #[test]
    fn breadth_hides_nothing() {
        let root = tempfile::tempdir().expect("a directory");
        for number in 0..3000 {
            fs::create_dir_all(root.path().join(format!("{number}/below"))).expect("made");
        }
        assert_eq!(count(root.path(), go_on).expect("counted").inodes, 6001);
    }

    #[test]
    fn links_lead_nowhere_and_names_count_once() {
        let (root, other) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
        fs::write(other.path().join("large"), vec![1; 1 << 20]).expect("written");
        symlink(other.path(), root.path().join("elsewhere")).expect("linked");
        fs::write(root.path().join("one"), vec![1; 1 << 16]).expect("written");
        fs::hard_link(root.path().join("one"), root.path().join("again")).expect("linked");
        let usage = count(root.path(), go_on).expect("counted");
        assert_eq!(usage.inodes, 3);
        assert!(usage.bytes < 1 << 20);
        assert!(count(&root.path().join("elsewhere"), go_on).is_err());
    }

    /// Directories are swapped for links to a large tree while they are walked.
    #[test]
    fn a_directory_that_becomes_a_link_is_not_followed() {
        let (root, other) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
        fs::write(other.path().join("large"), vec![1; 1 << 20]).expect("written");
        for number in 0..50 {
            fs::create_dir(root.path().join(number.to_string())).expect("made");
        }
        let mut entries = 0;
        let usage = count(root.path(), || {
            entries += 1;
            if entries == 50 {
                for number in 0..50 {
                    let path = root.path().join(number.to_string());
                    fs::remove_dir(&path).and_then(|()| symlink(other.path(), &path)).expect("swapped");
                }
            }
            Ok(())
        });
        assert!(usage.expect("counted").bytes < 1 << 20);
    }

    #[test]
    fn a_walk_that_is_moved_away_is_an_error() {
        let (root, other) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
        fs::create_dir_all(root.path().join("a/b/c")).expect("made");
        fs::write(root.path().join("a/b/c/file"), "x").expect("written");
        let usage = count(root.path(), || {
            let _ = fs::rename(root.path().join("a/b/c"), other.path().join("c")); // once the walk is in it
            Ok(())
        });
        let is_counted = usage.as_ref().is_ok_and(|usage| usage.inodes <= 4);
        assert!(is_counted || usage.is_err_and(|e| e.to_string().contains("moved")), "nothing else is counted");
    }

    /// Programs make and remove directories all the time: that ends no walk.
    #[test]
    fn a_directory_that_is_removed_while_it_is_read_ends_no_walk() {
        let root = tempfile::tempdir().expect("a directory");
        fs::write(root.path().join("kept"), "x").expect("written");
        // More entries than one getdents call returns.
        for number in 0..20_000 {
            fs::create_dir_all(root.path().join("busy")).expect("made");
            fs::write(root.path().join(format!("busy/{number}")), "").expect("written");
        }
        let mut entries = 0;
        let usage = count(root.path(), || {
            entries += 1;
            if entries == 3 {
                fs::remove_dir_all(root.path().join("busy")).expect("removed");
            }
            Ok(())
        });
        let usage = usage.expect("counted");
        assert!(entries > 3 && usage.inodes < 20_000, "it was read in part: {entries} entries, {usage:?}");
    }

    #[test]
    fn a_walk_can_be_ended() {
        let root = tempfile::tempdir().expect("a directory");
        fs::write(root.path().join("one"), "x").expect("written");
        let ended = count(root.path(), || Err(io::ErrorKind::Interrupted.into())).expect_err("ended");
        assert_eq!(ended.kind(), io::ErrorKind::Interrupted);
    }
}
