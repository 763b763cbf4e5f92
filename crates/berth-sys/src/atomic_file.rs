//! Atomic replacement of a small file: a crash leaves either the old or the new content.
//!
//! Temporary file in the same directory (name begins with `.`), fsync, rename, fsync of the directory. Blocking: call
//! it from the blocking pool. Implements spec 06 §4, 01 §17.1.

use std::{
    fs::{self, File, OpenOptions, Permissions},
    io::{self, Read, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};

/// Attempts to find an unused temporary name.
const ATTEMPTS: u32 = 16;

/// Maximum size of a state file that is read, in bytes.
const MAX_SIZE: u64 = 64 << 20;

/// Reads the content; `None` if the file does not exist. Others may write to the directory (that of device plugins is
/// mounted into their containers): links are not followed, and nothing but a regular file of at most 64 MiB is read.
///
/// # Errors
/// Any read error other than a missing file; the file is not a regular file, or is larger.
pub fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    // Opening a FIFO must not wait for its other end.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::NOENT) => return Ok(None),
        Err(Errno::LOOP) => return Err(invalid("not a regular file, but a link")),
        Err(e) => return Err(e.into()),
    };
    if !file.metadata()?.is_file() {
        return Err(invalid("not a regular file"));
    }
    let mut content = Vec::new();
    file.take(MAX_SIZE + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MAX_SIZE {
        return Err(invalid("larger than 64 MiB"));
    }
    Ok(Some(content))
}

fn invalid(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// Replaces the content; creates a missing file. `mode` is applied regardless of the umask. The directory must exist.
///
/// # Errors
/// Any error of writing, syncing, or renaming; the old content is in place then, unless only the last sync (of the
/// directory) failed.
pub fn replace(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let directory = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let (temporary, file) = create_temporary(directory)?;
    let result = fill(file, content, mode).and_then(|()| fs::rename(&temporary, path));
    if let Err(e) = result {
        // The write error is returned; a leftover is ignored by readers of the directory.
        let _ = fs::remove_file(&temporary);
        return Err(e);
    }
    File::open(directory)?.sync_all()
}

/// Like [`replace`] but without syncing: for content that is rewritten after a crash anyway.
///
/// # Errors
/// Any error of writing or renaming; the old content is in place then.
pub fn replace_unsynced(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let directory = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let (temporary, mut file) = create_temporary(directory)?;
    let written = file.write_all(content).and_then(|()| file.set_permissions(Permissions::from_mode(mode)));
    if let Err(e) = written.and_then(|()| fs::rename(&temporary, path)) {
        // The write error is returned; a leftover is ignored by readers of the directory.
        let _ = fs::remove_file(&temporary);
        return Err(e);
    }
    Ok(())
}

fn create_temporary(directory: &Path) -> io::Result<(PathBuf, File)> {
    for _ in 0..ATTEMPTS {
        let path = directory.join(format!(".{:08x}", rand::random::<u32>()));
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            other => return Ok((path, other?)),
        }
    }
    Err(io::Error::new(io::ErrorKind::AlreadyExists, "no unused temporary name"))
}

fn fill(mut file: File, content: &[u8], mode: u32) -> io::Result<()> {
    file.write_all(content)?;
    file.set_permissions(Permissions::from_mode(mode))?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_new_content_replaces_the_old_and_nothing_is_left_behind() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("state");
        assert_eq!(read(&path).expect("readable"), None);
        for content in ["first", "second, longer", ""] {
            replace(&path, content.as_bytes(), 0o600).expect("writable");
            assert_eq!(read(&path).expect("readable").as_deref(), Some(content.as_bytes()));
        }
        let left: Vec<_> = fs::read_dir(directory.path()).expect("listable").collect();
        assert_eq!(left.len(), 1);
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn only_regular_files_of_bounded_size_are_read() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        fs::write(at("file"), "x").expect("writable");
        std::os::unix::fs::symlink("file", at("link")).expect("a link");
        rustix::fs::mknodat(rustix::fs::CWD, at("fifo"), rustix::fs::FileType::Fifo, Mode::from_raw_mode(0o600), 0)
            .expect("a FIFO");
        fs::create_dir(at("directory")).expect("a directory");
        File::create(at("grown")).expect("a file").set_len(4 << 30).expect("sparse");
        for (name, expected) in [
            ("link", "not a regular file, but a link"),
            ("fifo", "not a regular file"),
            ("directory", "not a regular file"),
            ("grown", "larger than 64 MiB"),
        ] {
            assert_eq!(read(&at(name)).expect_err(name).to_string(), expected, "{name}");
        }
    }

    #[test]
    fn a_failed_replacement_keeps_the_old_content() {
        let directory = tempfile::tempdir().expect("a directory");
        let target = directory.path().join("state");
        fs::create_dir(&target).expect("creatable");
        assert!(replace(&target, b"x", 0o600).is_err(), "a directory cannot be renamed over");
        assert_eq!(fs::read_dir(directory.path()).expect("listable").count(), 1, "the temporary file is gone");
        assert!(replace(&directory.path().join("missing/state"), b"x", 0o600).is_err());
    }
}
