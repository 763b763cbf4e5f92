//! Atomic replacement of a small file: a crash leaves either the old or the new content.
//!
//! Temporary file in the same directory (name begins with `.`), fsync, rename, fsync of the directory. Blocking: call
//! it from the blocking pool. Implements spec 06 §4, 01 §17.1.

use std::{
    fs::{self, File, OpenOptions, Permissions},
    io::{self, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

/// Attempts to find an unused temporary name.
const ATTEMPTS: u32 = 16;

/// Reads the content; `None` if the file does not exist.
///
/// # Errors
/// Any read error other than a missing file.
pub fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(content) => Ok(Some(content)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
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
    fn a_failed_replacement_keeps_the_old_content() {
        let directory = tempfile::tempdir().expect("a directory");
        let target = directory.path().join("state");
        fs::create_dir(&target).expect("creatable");
        assert!(replace(&target, b"x", 0o600).is_err(), "a directory cannot be renamed over");
        assert_eq!(fs::read_dir(directory.path()).expect("listable").count(), 1, "the temporary file is gone");
        assert!(replace(&directory.path().join("missing/state"), b"x", 0o600).is_err());
    }
}
