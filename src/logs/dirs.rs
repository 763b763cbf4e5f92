//! File operations on logs, rotated logs, and the log directories of pods.

use std::{
    ffi::OsStr,
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use berth_sys::tree_removal::remove_tree;
use berth_types::{PodRef, PodUid};

/// UID of the pod that a log directory `<namespace>_<name>_<uid>` belongs to; `None` for other names.
pub fn uid_of(directory: &str) -> Option<PodUid> {
    let (_, uid) = directory.rsplit_once('_')?;
    (!uid.is_empty()).then(|| PodUid::from(uid))
}

/// Names in the directory of `log` that begin with `<log><separator>`; empty if the directory does not
/// exist.
///
/// # Errors
/// The directory cannot be read.
pub fn beside(log: &Path, separator: &str) -> io::Result<Vec<String>> {
    let (Some(directory), Some(name)) = (log.parent(), log.file_name().and_then(OsStr::to_str)) else {
        return Ok(Vec::new());
    };
    let prefix = format!("{name}{separator}");
    let mut found = Vec::new();
    for entry in absent_is_empty(fs::read_dir(directory))?.into_iter().flatten() {
        if let Ok(name) = entry?.file_name().into_string()
            && name.starts_with(&prefix)
        {
            found.push(name);
        }
    }
    Ok(found)
}

/// Names of rotated files of `log`, including leftovers: regular files only, because a container that
/// can write to the directory can create a FIFO or a directory of such a name.
///
/// # Errors
/// The directory cannot be read.
pub fn rotated_files(log: &Path) -> io::Result<Vec<String>> {
    let mut names = beside(log, ".")?;
    names.retain(|name| fs::symlink_metadata(log.with_file_name(name)).is_ok_and(|metadata| metadata.is_file()));
    Ok(names)
}

/// Deletes `<log>*`. Files that are already gone count as deleted.
///
/// # Errors
/// The first file that cannot be removed, with its path in the text.
pub fn remove_log(log: &Path) -> io::Result<()> {
    for name in beside(log, "")? {
        let path = log.with_file_name(name);
        remove(&path)
            .map_err(|e| io::Error::new(e.kind(), format!("failed to remove container {}: {e}", path.display())))?;
    }
    Ok(())
}

/// Removes a file, or a directory created in its place; an absent one counts as removed.
///
/// # Errors
/// It cannot be removed.
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::IsADirectory => remove_tree(path),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Removes the log directory `<namespace>_<name>_<uid>` of a pod below `root`; an absent one counts as
/// removed.
///
/// # Errors
/// It cannot be removed, or names of the pod (which may come from the runtime's labels) would lead out
/// of `root`.
pub fn remove_of_pod(root: &Path, pod: &PodRef) -> io::Result<()> {
    let name = format!("{}_{}_{}", pod.namespace, pod.name, pod.uid);
    if name.contains('/') {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("invalid directory name {name:?}: must not contain '/'"),
        ));
    }
    remove_tree(&root.join(name))
}

/// Log directories of pods below `root`.
///
/// # Errors
/// The root cannot be read; an absent one counts as empty.
pub fn pod_directories(root: &Path) -> io::Result<Vec<(PodUid, PathBuf)>> {
    let mut found = Vec::new();
    for entry in absent_is_empty(fs::read_dir(root))?.into_iter().flatten() {
        let entry = entry?;
        let uid = entry.file_name().to_str().and_then(uid_of);
        if let Some(uid) = uid.filter(|_| entry.file_type().is_ok_and(|t| t.is_dir())) {
            found.push((uid, entry.path()));
        }
    }
    Ok(found)
}

/// Creates a directory and its parents with a mode.
///
/// # Errors
/// It cannot be created.
pub fn create(path: &Path, mode: u32) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(mode).create(path)
}

/// `None` for a directory that does not exist.
pub fn absent_is_empty(read: io::Result<fs::ReadDir>) -> io::Result<Option<fs::ReadDir>> {
    match read {
        Ok(entries) => Ok(Some(entries)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_uid_is_what_stands_last() {
        for (name, uid) in
            [("ns_pod_1-2", Some("1-2")), ("ns_p_x_uid", Some("uid")), ("lost+found", None), ("a_", None)]
        {
            assert_eq!(uid_of(name), uid.map(PodUid::from), "{name}");
        }
    }

    #[test]
    fn a_log_goes_with_all_that_was_rotated() {
        let root = tempfile::tempdir().expect("a directory");
        for name in ["1.log", "1.log.20260101-000000", "1.log.20250101-000000.gz", "10.log", "0.log"] {
            fs::write(root.path().join(name), "x").expect("written");
        }
        remove_log(&root.path().join("1.log")).expect("removed");
        let entries = fs::read_dir(root.path()).expect("read");
        let mut left: Vec<String> = entries.flatten().filter_map(|e| e.file_name().into_string().ok()).collect();
        left.sort();
        assert_eq!(left, ["0.log", "10.log"]);
        remove_log(&root.path().join("absent/1.log")).expect("nothing to remove");
    }
}
