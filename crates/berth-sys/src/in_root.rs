//! Paths of a container's root, walked so that no link and nobody who changes the root meanwhile leads outside.
//!
//! The kernel takes the root's descriptor for `/` (`openat2`, `RESOLVE_IN_ROOT`); what is missing is made in the
//! directory a descriptor holds. Spec 09a §8.2.

use std::{
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{FileType, Mode, OFlags, ResolveFlags, mkdirat, openat2, readlinkat},
    io::Errno,
};

/// The root is `/`, and links of `/proc` that lead out of it are refused.
const RESOLVE: ResolveFlags = ResolveFlags::IN_ROOT.union(ResolveFlags::NO_MAGICLINKS);
/// More links than the kernel follows in one path.
const MOST_LINKS: usize = 40;

/// What is made where nothing is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Missing {
    /// A directory, 0755.
    Directory,
    /// An empty file, 0644.
    File,
}

/// Opens what a path names inside the root, as `O_PATH` and links followed.
///
/// # Errors
/// What the kernel says.
pub fn open(root: BorrowedFd<'_>, path: &Path) -> io::Result<OwnedFd> {
    open_with(root, path, OFlags::PATH)
}

/// As [`open`], with flags of its own.
///
/// # Errors
/// What the kernel says.
pub fn open_with(root: BorrowedFd<'_>, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let path = if path.as_os_str().is_empty() { Path::new("/") } else { path };
    loop {
        match openat2(root, path, flags | OFlags::CLOEXEC, Mode::empty(), RESOLVE) {
            // The kernel saw a rename while it walked and wants to be asked again.
            Err(Errno::AGAIN | Errno::INTR) => {}
            other => return Ok(other?),
        }
    }
}

/// Whether a path is a directory or missing, with no link in it: where `/proc` and `/sys` may be mounted.
///
/// # Errors
/// What the kernel says.
pub fn is_ordinary_directory(root: BorrowedFd<'_>, path: &Path) -> io::Result<bool> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    loop {
        return match openat2(root, path, flags, Mode::empty(), RESOLVE | ResolveFlags::NO_SYMLINKS) {
            Ok(found) => Ok(FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode).is_dir()),
            Err(Errno::NOENT) => Ok(true),
            Err(Errno::LOOP | Errno::NOTDIR) => Ok(false),
            Err(Errno::AGAIN | Errno::INTR) => continue,
            Err(error) => Err(error.into()),
        };
    }
}

/// Opens what a path names inside the root; what is missing of it is made, its parents as directories.
///
/// # Errors
/// What the kernel says; `ELOOP` for too many links.
pub fn open_or_make(root: BorrowedFd<'_>, path: &Path, missing: Missing) -> io::Result<OwnedFd> {
    let mut wanted = path.to_owned();
    for _ in 0..MOST_LINKS {
        match open(root, &wanted) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => return other,
        }
        match make(root, &wanted, missing)? {
            None => {}
            Some(led_to) => wanted = led_to,
        }
    }
    Err(Errno::LOOP.into())
}

/// Makes the first missing part of a path; where a link that leads nowhere stands instead, tells where it leads.
fn make(root: BorrowedFd<'_>, path: &Path, missing: Missing) -> io::Result<Option<PathBuf>> {
    let parts: Vec<Component<'_>> = path.components().collect();
    let mut parent = open(root, Path::new("/"))?;
    for (index, part) in parts.iter().enumerate() {
        let walked: PathBuf = parts.iter().take(index + 1).collect();
        let Component::Normal(name) = part else {
            // The target of a link may lead upwards: what follows is made there.
            parent = open(root, &walked)?;
            continue;
        };
        match open(root, &walked) {
            Ok(found) => {
                parent = found;
                continue;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let is_last = index + 1 == parts.len();
        let made = match missing {
            Missing::File if is_last => {
                let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                rustix::fs::openat(&parent, *name, flags, Mode::from_raw_mode(0o644)).map(drop)
            }
            _ => mkdirat(parent.as_fd(), *name, Mode::from_raw_mode(0o755)),
        };
        match made {
            Ok(()) => {}
            // Somebody was faster, or it is a link that leads nowhere.
            Err(Errno::EXIST) => match readlinkat(parent.as_fd(), *name, Vec::new()) {
                Ok(target) => {
                    let target = Path::new(std::ffi::OsStr::from_bytes(target.as_bytes()));
                    let base = walked.parent().unwrap_or(Path::new("/"));
                    // Nothing is joined behind the last part: a path that ends in a slash names no file.
                    let rest = parts.iter().skip(index + 1);
                    return Ok(Some(rest.fold(base.join(target), |path, part| path.join(part))));
                }
                Err(Errno::INVAL) => {}
                Err(error) => return Err(error.into()),
            },
            Err(error) => return Err(error.into()),
        }
        parent = open(root, &walked)?;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    #[test]
    fn what_is_missing_is_made_inside_the_root() {
        let (dir, outside) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("a/b")).expect("makeable");
        symlink("/run", at("a/run")).expect("makeable"); // leads to nothing yet, inside
        symlink("../../..", at("a/up")).expect("makeable");
        symlink(outside.path(), at("out")).expect("makeable");
        symlink("loop", at("loop")).expect("makeable");
        fs::create_dir_all(at("etc")).expect("makeable");
        // As distributions have them, and as nobody has.
        symlink("../run/systemd/resolve/stub-resolv.conf", at("etc/resolv.conf")).expect("makeable");
        symlink("/tmp/elsewhere", at("etc/hosts")).expect("makeable");
        symlink("nowhere", at("etc/hostname")).expect("makeable");
        symlink("../../../etc/x/../y/z", at("etc/far")).expect("makeable");
        symlink("far", at("etc/farther")).expect("makeable");
        let root = fs::File::open(dir.path()).expect("openable");
        for (path, missing, made) in [
            ("/a/b/c/d", Missing::Directory, "a/b/c/d"),
            ("/a/b/file", Missing::File, "a/b/file"),
            ("/a/run/secrets/x", Missing::File, "run/secrets/x"),
            ("/a/up/up", Missing::Directory, "up"),
            ("/etc/resolv.conf", Missing::File, "run/systemd/resolve/stub-resolv.conf"),
            ("/../etc/hosts", Missing::File, "tmp/elsewhere"),
            ("/etc/hostname", Missing::File, "etc/nowhere"),
            ("/etc/farther", Missing::File, "etc/y/z"),
        ] {
            open_or_make(root.as_fd(), Path::new(path), missing).expect(path);
            let found = fs::symlink_metadata(at(made)).expect(made);
            assert_eq!(found.is_dir(), missing == Missing::Directory, "{path}");
        }
        assert!(!at("etc/run").exists(), "nothing is made elsewhere");
        open_or_make(root.as_fd(), Path::new("/out/x"), Missing::Directory).expect("made inside");
        assert_eq!(fs::read_dir(outside.path()).expect("readable").count(), 0, "nothing is made outside");
        assert!(open_or_make(root.as_fd(), Path::new("/loop/x"), Missing::Directory).is_err());
        assert!(open_or_make(root.as_fd(), Path::new("/a/b/file/x"), Missing::Directory).is_err());
    }

    #[test]
    fn a_directory_behind_a_link_is_not_ordinary() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("a/b")).expect("makeable");
        fs::write(at("file"), "").expect("writable");
        symlink("a", at("link")).expect("makeable");
        symlink("nowhere", at("dangling")).expect("makeable");
        let root = fs::File::open(dir.path()).expect("openable");
        for (path, expected) in [
            ("/a/b", true),
            ("/missing", true),
            ("/a/missing", true),
            ("/file", false),
            ("/file/x", false),
            ("/link", false),
            ("/link/b", false),
            ("/dangling", false),
        ] {
            let found = is_ordinary_directory(root.as_fd(), Path::new(path)).expect(path);
            assert_eq!(found, expected, "{path}");
        }
    }
}
