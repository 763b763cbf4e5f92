//! How full file systems and directories are. Everything here blocks, and may hang with the disk.
//! Behaviour: spec 04b §7.2.
//!
//! Directories belong to pods, which may change them while they are walked: no symbolic link is
//! followed, nothing on another file system is counted, and depth and breadth have bounds.

use std::{
    collections::HashSet,
    ffi::{CStr, CString},
    io,
    os::fd::OwnedFd,
    path::Path,
    rc::Rc,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, openat, statat, statvfs};

/// Entries looked at between two pauses.
const BATCH: u32 = 512;
/// The pause: at most some 300,000 entries a second.
const PAUSE: Duration = Duration::from_millis(1);
/// Directories that wait to be walked.
const MAX_PENDING: usize = 1 << 18;
/// Directories that are open at the same time.
const MAX_OPEN: usize = 512;
/// A block of `st_blocks`, whatever the file system's own is.
const BLOCK: u64 = 512;

/// A file system; bytes and inodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FileSystem {
    /// Size.
    pub capacity: u64,
    /// Free, also what only root may use.
    pub free: u64,
    /// What users may use.
    pub available: u64,
    /// Inodes.
    pub inodes: u64,
    /// Those that are free.
    pub inodes_free: u64,
}

impl FileSystem {
    /// The file system that holds a path.
    ///
    /// # Errors
    /// The path cannot be looked at.
    pub fn of(path: &Path) -> io::Result<Self> {
        let stat = statvfs(path)?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        Ok(Self {
            capacity: bytes(stat.f_blocks),
            free: bytes(stat.f_bfree),
            available: bytes(stat.f_bavail),
            inodes: stat.f_files,
            inodes_free: stat.f_ffree,
        })
    }

    /// Bytes in use.
    pub fn used(&self) -> u64 {
        self.capacity.saturating_sub(self.free)
    }

    /// Inodes in use.
    pub fn inodes_used(&self) -> u64 {
        self.inodes.saturating_sub(self.inodes_free)
    }
}

/// What files take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Bytes on disk.
    pub bytes: u64,
    /// Inodes.
    pub inodes: u64,
}

impl Usage {
    fn add(&mut self, stat: &Stat) {
        self.bytes = self.bytes.saturating_add(u64::try_from(stat.st_blocks).unwrap_or_default().saturating_mul(BLOCK));
        self.inodes = self.inodes.saturating_add(1);
    }
}

/// What the files directly in a directory take, without directories; a file that goes meanwhile counts or does not.
///
/// # Errors
/// The directory cannot be read.
pub fn files_in(directory: &Path, stop: &AtomicBool) -> io::Result<Usage> {
    let opened = open(CWD, directory)?;
    let mut usage = Usage::default();
    let mut links = HashSet::new();
    for entry in Dir::read_from(&opened)? {
        let entry = entry?;
        if stop.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        if let Some(stat) = look(&opened, entry.file_name())?
            && !FileType::from_raw_mode(stat.st_mode).is_dir()
            && is_first(&stat, &mut links)
        {
            usage.add(&stat);
        }
    }
    Ok(usage)
}

/// What one file takes.
///
/// # Errors
/// It cannot be looked at.
pub fn file(path: &Path) -> io::Result<Usage> {
    let mut usage = Usage::default();
    usage.add(&statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW)?);
    Ok(usage)
}

/// What a directory and all below it take, as `du` counts: files with several names once, nothing on other file
/// systems.
///
/// # Errors
/// A directory cannot be read, the tree is too wide or too deep, or `stop` was set.
pub fn tree(directory: &Path, stop: &AtomicBool) -> io::Result<Usage> {
    let root = open(CWD, directory)?;
    let top = statat(&root, c"", AtFlags::EMPTY_PATH)?;
    let mut walk = Walk {
        device: top.st_dev,
        usage: Usage::default(),
        links: HashSet::new(),
        pending: Vec::new(),
        open: 0,
        looked: 0,
    };
    walk.usage.add(&top);
    walk.directory(&Rc::new(root), stop)?;
    while let Some((parent, name)) = walk.pending.pop() {
        walk.open = walk.open.saturating_sub(usize::from(Rc::strong_count(&parent) == 1));
        let child = match open(&parent, &*name) {
            Ok(child) => child,
            // Gone, or a link now.
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => continue,
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => continue,
            Err(error) => return Err(error),
        };
        drop(parent);
        walk.directory(&Rc::new(child), stop)?;
    }
    Ok(walk.usage)
}

struct Walk {
    device: u64,
    usage: Usage,
    links: HashSet<u64>,
    pending: Vec<(Rc<OwnedFd>, CString)>,
    open: usize,
    looked: u32,
}

impl Walk {
    fn directory(&mut self, opened: &Rc<OwnedFd>, stop: &AtomicBool) -> io::Result<()> {
        for entry in Dir::read_from(&**opened)? {
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            self.pause(stop)?;
            let Some(stat) = look(opened, name)? else { continue };
            let is_directory = FileType::from_raw_mode(stat.st_mode).is_dir();
            if is_directory && stat.st_dev != self.device {
                continue;
            }
            if !is_directory && !is_first(&stat, &mut self.links) {
                continue;
            }
            self.usage.add(&stat);
            if is_directory {
                if self.pending.len() >= MAX_PENDING || self.open > MAX_OPEN {
                    return Err(io::Error::other("too many directories"));
                }
                self.pending.push((opened.clone(), name.to_owned()));
            }
        }
        // Open as long as one that waits below it needs it.
        self.open += usize::from(Rc::strong_count(opened) > 1);
        Ok(())
    }

    fn pause(&mut self, stop: &AtomicBool) -> io::Result<()> {
        self.looked += 1;
        if self.looked >= BATCH {
            self.looked = 0;
            thread::sleep(PAUSE);
        }
        if stop.load(Ordering::Relaxed) { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    }
}

/// Whether a file with several names is seen for the first time.
fn is_first(stat: &Stat, links: &mut HashSet<u64>) -> bool {
    stat.st_nlink <= 1 || FileType::from_raw_mode(stat.st_mode).is_dir() || links.insert(stat.st_ino)
}

fn open(at: impl std::os::fd::AsFd, name: impl rustix::path::Arg) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    Ok(openat(at, name, flags, Mode::empty())?)
}

/// `None` where the entry has gone meanwhile.
fn look(directory: &OwnedFd, name: &CStr) -> io::Result<Option<Stat>> {
    match statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat)),
        Err(rustix::io::Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, process::Command};

    use super::*;

    static GO_ON: AtomicBool = AtomicBool::new(false);

    fn sample() -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path();
        fs::create_dir_all(path.join("a/b/c")).expect("made");
        fs::write(path.join("one"), vec![1; 10_000]).expect("written");
        fs::write(path.join("a/two"), vec![1; 5000]).expect("written");
        fs::write(path.join("a/b/c/three"), vec![1; 1]).expect("written");
        fs::hard_link(path.join("one"), path.join("a/again")).expect("linked");
        fs::hard_link(path.join("one"), path.join("beside")).expect("linked");
        symlink("/usr", path.join("a/elsewhere")).expect("linked");
        root
    }

    #[test]
    fn a_tree_is_counted_as_du_counts_it() {
        let root = sample();
        let usage = tree(root.path(), &GO_ON).expect("readable");
        let du = |option: &str| -> u64 {
            let out = Command::new("du").args(["-s", option]).arg(root.path()).output().expect("du runs");
            let text = String::from_utf8(out.stdout).expect("text");
            text.split_whitespace().next().and_then(|n| n.parse().ok()).expect("a number")
        };
        assert_eq!(usage.bytes, du("-B1"));
        assert_eq!(usage.inodes, du("--inodes"));
    }

    #[test]
    fn only_files_of_the_directory_itself() {
        let root = sample();
        let (flat, one) =
            (files_in(root.path(), &GO_ON).expect("readable"), file(&root.path().join("one")).expect("there"));
        assert_eq!(flat, one, "two names of one file");
        assert!(files_in(&root.path().join("absent"), &GO_ON).is_err());
        assert!(tree(&root.path().join("one"), &GO_ON).is_err(), "no directory");
        assert!(tree(&root.path().join("a/elsewhere"), &GO_ON).is_err(), "links are not followed");
    }

    #[test]
    fn a_walk_can_be_stopped() {
        let root = sample();
        let error = tree(root.path(), &AtomicBool::new(true)).expect_err("stopped");
        assert_eq!(error.kind(), io::ErrorKind::Interrupted);
    }

    #[test]
    fn a_deep_tree_needs_no_more_than_its_share_of_open_files() {
        let root = tempfile::tempdir().expect("a directory");
        let mut path = root.path().to_owned();
        for _ in 0..700 {
            path.push("d");
        }
        fs::create_dir_all(&path).expect("made");
        assert_eq!(tree(root.path(), &GO_ON).map(|u| u.inodes).expect("readable"), 701);
    }

    #[test]
    fn file_systems_tell_their_size() {
        let found = FileSystem::of(Path::new("/")).expect("there");
        assert!(found.capacity > 0 && found.used() <= found.capacity && found.inodes_used() <= found.inodes);
        let odd = FileSystem { capacity: 1, free: 2, inodes: 0, inodes_free: 5, ..FileSystem::default() };
        assert_eq!((odd.used(), odd.inodes_used()), (0, 0));
    }
}
