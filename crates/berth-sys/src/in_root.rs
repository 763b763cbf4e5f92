//! Race-free path resolution inside a container's root file system (`openat2`, `RESOLVE_IN_ROOT`).
//!
//! No link, and no concurrent change of the root, leads outside. The kernel treats the root's descriptor as `/`;
//! missing components are created relative to a directory descriptor. Implements spec 09a §8.2.

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

/// The root is `/`, and magic links of `/proc` are refused.
const RESOLVE: ResolveFlags = ResolveFlags::IN_ROOT.union(ResolveFlags::NO_MAGICLINKS);
/// Maximum number of dangling links followed; the kernel follows 40 links per path.
const MOST_LINKS: usize = 40;

/// What to create if the path does not exist.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CreateKind {
    /// A directory, 0755.
    Directory,
    /// An empty file, 0644.
    File,
}

/// Opens a path inside the root as an `O_PATH` descriptor; follows links.
///
/// # Errors
/// The kernel's error.
pub fn open(root: BorrowedFd<'_>, path: &Path) -> io::Result<OwnedFd> {
    open_with(root, path, OFlags::PATH)
}

/// As [`open`], with the given flags.
///
/// # Errors
/// The kernel's error.
pub fn open_with(root: BorrowedFd<'_>, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let path = if path.as_os_str().is_empty() { Path::new("/") } else { path };
    loop {
        match openat2(root, path, flags | OFlags::CLOEXEC, Mode::empty(), RESOLVE) {
            // The kernel detected a concurrent rename and requests a retry.
            Err(Errno::AGAIN | Errno::INTR) => {}
            other => return Ok(other?),
        }
    }
}

/// Whether a path is a directory or missing, without a link in it: suitable as mount point of `/proc` and `/sys`.
///
/// # Errors
/// The kernel's error.
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

/// Opens a path inside the root and creates it if missing, with its parent directories.
///
/// # Errors
/// The kernel's error; `ELOOP` for too many links.
pub fn open_or_make(root: BorrowedFd<'_>, path: &Path, missing: CreateKind) -> io::Result<OwnedFd> {
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

/// Creates the missing components of a path; at a dangling link it stops and returns the path that the link leads to.
fn make(root: BorrowedFd<'_>, path: &Path, missing: CreateKind) -> io::Result<Option<PathBuf>> {
    let parts: Vec<Component<'_>> = path.components().collect();
    let mut parent = open(root, Path::new("/"))?;
    for (index, part) in parts.iter().enumerate() {
        let walked: PathBuf = parts.iter().take(index + 1).collect();
        let Component::Normal(name) = part else {
            // The target of a link may contain `..`: what follows is created there.
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
            CreateKind::File if is_last => {
                let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                rustix::fs::openat(&parent, *name, flags, Mode::from_raw_mode(0o644)).map(drop)
            }
            _ => mkdirat(parent.as_fd(), *name, Mode::from_raw_mode(0o755)),
        };
        match made {
            Ok(()) => {}
            // Created concurrently, or a dangling link.
            Err(Errno::EXIST) => match readlinkat(parent.as_fd(), *name, Vec::new()) {
                Ok(target) => {
                    let target = Path::new(std::ffi::OsStr::from_bytes(target.as_bytes()));
                    let base = walked.parent().unwrap_or(Path::new("/"));
                    // Nothing is joined after the last component: a path that ends in a slash names no file.
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
        symlink("/run", at("a/run")).expect("makeable"); // dangling so far, inside
        symlink("../../..", at("a/up")).expect("makeable");
        symlink(outside.path(), at("out")).expect("makeable");
        symlink("loop", at("loop")).expect("makeable");
        fs::create_dir_all(at("etc")).expect("makeable");
        // As in distributions, and unusual ones.
        symlink("../run/systemd/resolve/stub-resolv.conf", at("etc/resolv.conf")).expect("makeable");
        symlink("/tmp/elsewhere", at("etc/hosts")).expect("makeable");
        symlink("nowhere", at("etc/hostname")).expect("makeable");
        symlink("../../../etc/x/../y/z", at("etc/far")).expect("makeable");
        symlink("far", at("etc/farther")).expect("makeable");
        let root = fs::File::open(dir.path()).expect("openable");
        for (path, missing, made) in [
            ("/a/b/c/d", CreateKind::Directory, "a/b/c/d"),
            ("/a/b/file", CreateKind::File, "a/b/file"),
            ("/a/run/secrets/x", CreateKind::File, "run/secrets/x"),
            ("/a/up/up", CreateKind::Directory, "up"),
            ("/etc/resolv.conf", CreateKind::File, "run/systemd/resolve/stub-resolv.conf"),
            ("/../etc/hosts", CreateKind::File, "tmp/elsewhere"),
            ("/etc/hostname", CreateKind::File, "etc/nowhere"),
            ("/etc/farther", CreateKind::File, "etc/y/z"),
        ] {
            open_or_make(root.as_fd(), Path::new(path), missing).expect(path);
            let found = fs::symlink_metadata(at(made)).expect(made);
            assert_eq!(found.is_dir(), missing == CreateKind::Directory, "{path}");
        }
        assert!(!at("etc/run").exists(), "nothing is made elsewhere");
        open_or_make(root.as_fd(), Path::new("/out/x"), CreateKind::Directory).expect("made inside");
        assert_eq!(fs::read_dir(outside.path()).expect("readable").count(), 0, "nothing is made outside");
        assert!(open_or_make(root.as_fd(), Path::new("/loop/x"), CreateKind::Directory).is_err());
        assert!(open_or_make(root.as_fd(), Path::new("/a/b/file/x"), CreateKind::Directory).is_err());
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
