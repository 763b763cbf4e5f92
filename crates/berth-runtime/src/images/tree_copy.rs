//! Copies directory trees: container roots on machines without overlayfs are copies of an image.
//!
//! Owners, modes, times, attributes, hard links, and holes are preserved; blocks are shared where the file system
//! supports reflinks. Blocking. Implements spec 09b §5.1.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::File,
    io::{self, Read, Seek},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
    time::Instant,
};

use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, SeekFrom, Stat},
    io::Errno,
};

use super::{
    error::{ImageError, IoContext},
    unpacker::root::{NameInDirectory, PathMode, RootDir, create_file, make_folder, names},
};

/// Maximum bytes copied between two checks of the deadline.
const PIECE: u64 = 64 << 20;
/// Kernel's maximum size of an attribute name list and of a value, bytes.
const ATTRIBUTES: usize = 64 << 10;

/// Limits of a copy. Shared blocks do not count.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Bytes of content.
    pub bytes: u64,
    /// When the copy fails with a timeout.
    pub deadline: Option<Instant>,
}

impl Budget {
    /// No limits.
    pub const UNLIMITED: Self = Self { bytes: u64::MAX, deadline: None };

    /// Deducts bytes that are about to be copied.
    fn take(&mut self, bytes: u64) -> io::Result<()> {
        if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(Errno::TIMEDOUT.into());
        }
        self.bytes = self.bytes.checked_sub(bytes).ok_or(Errno::NOSPC)?;
        Ok(())
    }
}

/// Copies the content of a directory into an existing one, including the directory's own owner, mode, and attributes.
///
/// # Errors
/// An I/O error; `ENOSPC` if the byte budget is exhausted, `ETIMEDOUT` after the deadline.
pub fn copy_tree(from: &Path, to: &Path, mut budget: Budget) -> Result<(), ImageError> {
    let what = || format!("copy {}", from.display());
    let (from_root, to_root) = (RootDir::open(from).attempt(what())?, RootDir::open(to).attempt(what())?);
    let mut links = BTreeMap::new();
    let result = (|| {
        // A stack of paths: the image decides depth and breadth, descriptors are limited.
        let mut stack: Vec<Vec<u8>> = vec![Vec::new()];
        while let Some(path) = stack.pop() {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY;
            let (from, to) = (from_root.resolve(&path, flags)?, to_root.resolve(&path, flags)?);
            let stat = rustix::fs::fstat(&from)?;
            for name in names(&from)? {
                let mut below = path.clone();
                if !below.is_empty() {
                    below.push(b'/');
                }
                below.extend_from_slice(name.as_bytes());
                if copy_entry(
                    at(from.as_fd(), &name),
                    at(to.as_fd(), &name),
                    &to_root,
                    &below,
                    &mut links,
                    &mut budget,
                )? {
                    stack.push(below);
                }
            }
            let (dot_from, dot_to) = (at(from.as_fd(), OsStr::new(".")), at(to.as_fd(), OsStr::new(".")));
            dot_to.set_owner(stat.st_uid, stat.st_gid)?;
            dot_to.set_mode(stat.st_mode & 0o7777)?;
            attributes(dot_from, dot_to)?;
            dot_to.set_times(accessed(&stat), modified(&stat))?;
        }
        Ok::<(), io::Error>(())
    })();
    result.attempt(what())
}

fn at<'a>(parent: BorrowedFd<'a>, name: &'a OsStr) -> NameInDirectory<'a> {
    NameInDirectory { parent, name }
}

/// Copies one entry; returns whether it is a directory, which is created empty.
fn copy_entry(
    source: NameInDirectory<'_>,
    target: NameInDirectory<'_>,
    root: &RootDir,
    path: &[u8],
    links: &mut BTreeMap<(u64, u64), Vec<u8>>,
    budget: &mut Budget,
) -> io::Result<bool> {
    budget.take(0)?;
    let Some(stat) = source.stat()? else { return Ok(false) };
    let kind = FileType::from_raw_mode(stat.st_mode);
    let key = (stat.st_dev, stat.st_ino);
    if kind == FileType::Directory {
        make_folder(target, 0o700)?;
        return Ok(true);
    }
    if stat.st_nlink > 1
        && let Some(known) = links.get(&key)
    {
        rustix::fs::linkat(root.fd(), OsStr::from_bytes(known), target.parent, target.name, AtFlags::empty())?;
        return Ok(false);
    }
    match kind {
        FileType::RegularFile => {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let mut file = File::from(rustix::fs::openat(source.parent, source.name, flags, Mode::empty())?);
            content(&mut file, &mut create_file(target)?, budget)?;
        }
        FileType::Symlink => {
            let text = rustix::fs::readlinkat(source.parent, source.name, Vec::new())?;
            rustix::fs::symlinkat(text.as_c_str(), target.parent, target.name)?;
        }
        FileType::Socket => return Ok(false),
        kind => rustix::fs::mknodat(target.parent, target.name, kind, Mode::from_raw_mode(0o600), stat.st_rdev)?,
    }
    target.set_owner(stat.st_uid, stat.st_gid)?;
    if kind != FileType::Symlink {
        target.set_mode(stat.st_mode & 0o7777)?;
    }
    attributes(source, target)?;
    target.set_times(accessed(&stat), modified(&stat))?;
    if stat.st_nlink > 1 {
        links.insert(key, path.to_vec());
    }
    Ok(false)
}

/// Shares the blocks, or else copies the data; holes are preserved.
fn content(from: &mut File, to: &mut File, budget: &mut Budget) -> io::Result<()> {
    if rustix::fs::ioctl_ficlone(&*to, &*from).is_ok() {
        return Ok(());
    }
    let mut at = 0;
    loop {
        let data = match rustix::fs::seek(&*from, SeekFrom::Data(at)) {
            // The rest is a hole, or the end of the file.
            Err(Errno::NXIO) => break,
            other => other?,
        };
        let hole = rustix::fs::seek(&*from, SeekFrom::Hole(data))?;
        from.seek(io::SeekFrom::Start(data))?;
        to.seek(io::SeekFrom::Start(data))?;
        let length = hole.saturating_sub(data).min(PIECE);
        budget.take(length)?;
        io::copy(&mut from.by_ref().take(length), to)?;
        at = data.saturating_add(length);
    }
    to.set_len(from.metadata()?.len())
}

fn attributes(from: NameInDirectory<'_>, to: NameInDirectory<'_>) -> io::Result<()> {
    let path = from.path();
    let path = OsStr::from_bytes(&path);
    let mut list = vec![0u8; ATTRIBUTES];
    let length = match rustix::fs::llistxattr(path, list.as_mut_slice()) {
        Err(Errno::OPNOTSUPP) => return Ok(()),
        other => other?,
    };
    let listed = list.get(..length).unwrap_or_default();
    for name in listed.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let mut value = vec![0u8; ATTRIBUTES];
        let length = rustix::fs::lgetxattr(path, OsStr::from_bytes(name), value.as_mut_slice())?;
        to.set_attribute(PathMode::Proc, name, value.get(..length).unwrap_or_default())?;
    }
    Ok(())
}

fn accessed(stat: &Stat) -> (i64, u32) {
    (stat.st_atime, u32::try_from(stat.st_atime_nsec).unwrap_or(0))
}

fn modified(stat: &Stat) -> (i64, u32) {
    (stat.st_mtime, u32::try_from(stat.st_mtime_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink},
    };

    use super::*;

    #[test]
    fn holes_stay_holes() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("a")).expect("makeable");
        fs::create_dir(at("b")).expect("makeable");
        let file = File::create(at("a/sparse")).expect("makeable");
        file.set_len(64 << 30).expect("a hole");
        file.write_all_at(b"middle", 1 << 30).expect("written");
        copy_tree(&at("a"), &at("b"), Budget { bytes: 1 << 20, deadline: None }).expect("holes cost nothing");
        let copy = fs::metadata(at("b/sparse")).expect("there");
        assert_eq!(copy.len(), 64 << 30);
        assert!(copy.blocks() * 512 < 1 << 20, "{} blocks", copy.blocks());
        let mut middle = [0; 8];
        File::open(at("b/sparse")).and_then(|file| file.read_exact_at(&mut middle, 1 << 30)).expect("readable");
        assert_eq!(&middle, b"middle\0\0");
    }

    /// An image cannot fill the disk, and a copy ends at its deadline.
    #[test]
    fn a_copy_ends_with_its_budget() {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory whose blocks cannot be shared");
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("a")).expect("makeable");
        fs::write(at("a/one"), vec![1; 1 << 20]).expect("written");
        fs::write(at("a/two"), vec![1; 1 << 20]).expect("written");
        let mut number = 0;
        let mut copy = |budget| {
            number += 1;
            let to = at(&number.to_string());
            fs::create_dir(&to).expect("makeable");
            copy_tree(&at("a"), &to, budget)
        };
        copy(Budget { bytes: 2 << 20, deadline: None }).expect("it is enough");
        let error = copy(Budget { bytes: (2 << 20) - 1, deadline: None }).expect_err("not enough");
        assert_eq!(error.kind, super::super::error::ImageErrorKind::ResourceExhausted, "{error}");
        let error = copy(Budget { bytes: u64::MAX, deadline: Some(Instant::now()) }).expect_err("too late");
        assert!(error.text.contains("timed out"), "{error}");
        assert_eq!(fs::read_dir(at("3")).expect("there").count(), 0);
    }

    #[test]
    fn a_copy_is_the_same() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("a/x/y")).expect("makeable");
        fs::create_dir(at("b")).expect("makeable");
        fs::write(at("a/x/file"), "content").expect("writable");
        fs::hard_link(at("a/x/file"), at("a/x/y/other")).expect("makeable");
        symlink("/etc/passwd", at("a/x/link")).expect("makeable");
        fs::set_permissions(at("a/x/file"), fs::Permissions::from_mode(0o640)).expect("settable");
        copy_tree(&at("a"), &at("b"), Budget::UNLIMITED).expect("copied");
        let (file, other) =
            (fs::metadata(at("b/x/file")).expect("there"), fs::metadata(at("b/x/y/other")).expect("there"));
        assert_eq!((file.ino(), file.mode() & 0o7777), (other.ino(), 0o640));
        assert_eq!(fs::read_to_string(at("b/x/y/other")).expect("readable"), "content");
        assert_eq!(fs::read_link(at("b/x/link")).expect("a link"), Path::new("/etc/passwd"));
        assert_ne!(file.ino(), fs::metadata(at("a/x/file")).expect("there").ino());
    }
}
