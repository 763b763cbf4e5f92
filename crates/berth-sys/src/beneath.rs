//! Symlink-safe file access below a directory that untrusted pods may write (`/var/log` endpoint).
//!
//! Every name in the directory is hostile. The kernel resolves the whole path below the directory's descriptor and
//! follows no link (`openat2`, `RESOLVE_BENEATH`, `RESOLVE_NO_SYMLINKS`); the result is checked before it is opened, so
//! that a FIFO cannot block and a device is not touched. One kind of link is supported: `containers/<name>` to a file
//! below `pods/`, which is resolved again from the directory. Blocking: call it from the blocking pool.
//! Implements spec 04 §5.6, §10.

use std::{
    ffi::OsStr,
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{CWD, Dir, FileType, Mode, OFlags, ResolveFlags},
    io::Errno,
};

/// An opened file or directory.
#[derive(Debug)]
pub enum OpenedEntry {
    /// A regular file, open for reading.
    File(File),
    /// A directory, open for reading.
    Directory(OwnedFd),
}

/// Opens the relative `path` below `root`.
///
/// # Errors
/// `NotFound`, also for other file types and for links; otherwise the kernel's error.
pub fn open(root: &Path, path: &Path) -> io::Result<OpenedEntry> {
    let root_fd = rustix::fs::openat(CWD, root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let found = match beneath(&root_fd, path) {
        Err(Errno::LOOP) => {
            let real = container_log(&root_fd, root, path).ok_or(io::ErrorKind::NotFound)?;
            beneath(&root_fd, &real)
        }
        other => other,
    };
    let found = found.map_err(|error| match error {
        Errno::LOOP | Errno::XDEV | Errno::NOTDIR | Errno::INVAL | Errno::NAMETOOLONG => io::ErrorKind::NotFound.into(),
        other => io::Error::from(other),
    })?;
    match FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode) {
        FileType::Directory => {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            Ok(OpenedEntry::Directory(rustix::fs::openat(&found, ".", flags, Mode::empty())?))
        }
        // Our own link to the descriptor just checked: nobody can replace it.
        FileType::RegularFile => File::open(format!("/proc/self/fd/{}", found.as_raw_fd())).map(OpenedEntry::File),
        _ => Err(io::ErrorKind::NotFound.into()),
    }
}

/// Names in a directory and whether each is a directory, sorted; at most `most` of them.
///
/// # Errors
/// The kernel's error.
pub fn list(directory: &OwnedFd, most: usize) -> io::Result<Vec<(String, bool)>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)?.take(most.saturating_add(2)) {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy();
        if name != "." && name != ".." {
            names.push((name.into_owned(), entry.file_type() == FileType::Directory));
        }
    }
    names.sort();
    names.truncate(most);
    Ok(names)
}

fn beneath(root: &impl AsFd, path: &Path) -> rustix::io::Result<OwnedFd> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_SYMLINKS;
    loop {
        match rustix::fs::openat2(root, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), resolve) {
            // The kernel detected a concurrent rename and requests a retry.
            Err(Errno::AGAIN | Errno::INTR) => {}
            other => return other,
        }
    }
}

/// Target of a link `containers/<name>` relative to the root; `None` unless it leads into `pods/`.
fn container_log(root_fd: &OwnedFd, root: &Path, path: &Path) -> Option<PathBuf> {
    let mut parts = path.components();
    let (Some(Component::Normal(folder)), Some(Component::Normal(name)), None) =
        (parts.next(), parts.next(), parts.next())
    else {
        return None;
    };
    if folder != "containers" {
        return None;
    }
    let folder = beneath(root_fd, Path::new("containers")).ok()?;
    let target = rustix::fs::readlinkat(&folder, name, Vec::new()).ok()?;
    let target = Path::new(OsStr::from_bytes(target.as_bytes()));
    let inside = if target.is_absolute() { target.strip_prefix(root) } else { target.strip_prefix("..") }.ok()?;
    let is_plain = inside.components().all(|part| matches!(part, Component::Normal(_)));
    (is_plain && inside.starts_with("pods")).then(|| inside.to_owned())
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::{fs::symlink, net::UnixListener},
    };

    use super::*;

    fn kind(root: &Path, path: &str) -> Result<&'static str, io::ErrorKind> {
        match open(root, Path::new(path)) {
            Ok(OpenedEntry::File(_)) => Ok("file"),
            Ok(OpenedEntry::Directory(_)) => Ok("directory"),
            Err(error) => Err(error.kind()),
        }
    }

    #[test]
    fn only_files_and_directories_below_the_root_are_opened() {
        // AC-04-23
        let (dir, outside) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("pods/ns_p_u/c")).expect("makeable");
        fs::create_dir(at("containers")).expect("makeable");
        fs::write(at("pods/ns_p_u/c/0.log"), "x").expect("writable");
        fs::write(at("syslog"), "x").expect("writable");
        fs::write(outside.path().join("secret"), "x").expect("writable");
        symlink("/etc/shadow", at("x")).expect("makeable");
        symlink("syslog", at("inside")).expect("makeable");
        symlink(outside.path(), at("out")).expect("makeable");
        symlink(at("pods/ns_p_u/c/0.log"), at("containers/absolute.log")).expect("makeable");
        symlink("../pods/ns_p_u/c/0.log", at("containers/relative.log")).expect("makeable");
        symlink("../pods/../../etc/shadow", at("containers/up.log")).expect("makeable");
        symlink(outside.path().join("secret"), at("containers/out.log")).expect("makeable");
        symlink("../pods/link", at("containers/twice.log")).expect("makeable");
        symlink("/etc/shadow", at("pods/link")).expect("makeable");
        nix::unistd::mkfifo(&at("fifo"), nix::sys::stat::Mode::S_IRWXU).expect("makeable");
        let _socket = UnixListener::bind(at("socket")).expect("bindable");
        let missing = Err(io::ErrorKind::NotFound);
        for (path, expected) in [
            ("", Ok("directory")),
            ("pods", Ok("directory")),
            ("syslog", Ok("file")),
            ("containers/absolute.log", Ok("file")),
            ("containers/relative.log", Ok("file")),
            ("containers/up.log", missing),
            ("containers/out.log", missing),
            ("containers/twice.log", missing),
            ("x", missing),
            ("inside", missing),
            ("out/secret", missing),
            ("../secret", missing),
            ("/etc/shadow", missing),
            ("pods/../../etc/shadow", missing),
            ("fifo", missing),
            ("socket", missing),
            ("syslog/x", missing),
            ("nothing", missing),
            ("nul\0", missing),
        ] {
            assert_eq!(kind(dir.path(), path), expected, "{path:?}");
        }
    }

    #[test]
    fn a_list_is_sorted_and_bounded() {
        let dir = tempfile::tempdir().expect("a directory");
        for name in ["b", "a", "c"] {
            fs::write(dir.path().join(name), "").expect("writable");
        }
        fs::create_dir(dir.path().join("d")).expect("makeable");
        let Ok(OpenedEntry::Directory(directory)) = open(dir.path(), Path::new("")) else { panic!("a directory") };
        let names = list(&directory, 100).expect("listable");
        let file = |name: &str| (name.to_owned(), false);
        assert_eq!(names, [file("a"), file("b"), file("c"), ("d".to_owned(), true)]);
    }
}
