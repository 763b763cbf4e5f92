//! Confines opening of logs to the log directory of the pod, across symbolic links.
//!
//! A pod may have its log directory, or all of them, mounted, and create links there; a link to a
//! target outside of the pod's log directory is rejected. A link to a file of the same pod is followed.
//! Spec 04 §10.

use std::{
    fs::File,
    io,
    path::{Component, Path, PathBuf},
};

use berth_sys::beneath::{self, OpenedEntry};

/// Why a log path is rejected.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    /// The path cannot be resolved.
    #[error("failed to try resolving symlinks in path {path:?}: {source}")]
    Resolve {
        /// Path of the log.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The path leads out of the pod's log directory.
    #[error("log file {path:?} is outside of the pod's log directory")]
    Outside {
        /// Path of the log.
        path: PathBuf,
    },
}

/// Resolved path of a log: without links, in the log directory of its pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogLocation {
    /// Resolved directory of all pods' logs.
    root: PathBuf,
    /// Resolved path of the file.
    pub path: PathBuf,
}

impl LogLocation {
    /// Resolves a log below `root`, which contains a directory per pod. Blocking.
    ///
    /// # Errors
    /// The path cannot be resolved, or leads out of the pod's log directory.
    pub fn find(root: &Path, log: &Path) -> Result<Self, PlaceError> {
        let outside = || PlaceError::Outside { path: log.to_owned() };
        let resolve = |path: &Path| {
            let wrong = |source| PlaceError::Resolve { path: log.to_owned(), source };
            std::fs::canonicalize(path).map_err(wrong)
        };
        let real_root = resolve(root)?;
        let inside = log.strip_prefix(root).or_else(|_| log.strip_prefix(&real_root)).map_err(|_| outside())?;
        let mut parts = inside.components();
        let Some(Component::Normal(pod)) = parts.next() else { return Err(outside()) };
        if !parts.all(|part| matches!(part, Component::Normal(_))) {
            return Err(outside());
        }
        let path = resolve(log)?;
        if !path.starts_with(real_root.join(pod)) {
            return Err(outside());
        }
        Ok(Self { root: real_root, path })
    }

    /// Opens a file below the root, which may have changed since: links are not followed, and only
    /// regular files are opened. Blocking.
    ///
    /// # Errors
    /// It is not a regular file, or cannot be opened.
    pub fn open(&self, path: &Path) -> io::Result<File> {
        let inside = path.strip_prefix(&self.root).map_err(|_| io::ErrorKind::NotFound)?;
        match beneath::open(&self.root, inside)? {
            OpenedEntry::File(file) => Ok(file),
            OpenedEntry::Directory(_) => Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    #[test]
    fn only_files_in_the_pods_own_directory_are_logs() {
        let (dir, other) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
        let root = dir.path().join("pods");
        let at = |name: &str| root.join(name);
        for pod in ["n_p_u/main", "n_q_u/main"] {
            fs::create_dir_all(at(pod)).expect("made");
            fs::write(at(pod).join("0.log"), pod).expect("written");
        }
        fs::write(other.path().join("secret"), "secret").expect("written");
        symlink("/etc/passwd", at("n_p_u/main/1.log")).expect("linked");
        symlink("../../n_q_u/main/0.log", at("n_p_u/main/2.log")).expect("linked");
        symlink("0.log", at("n_p_u/main/3.log")).expect("linked");
        symlink(other.path(), at("n_p_u/out")).expect("linked");
        symlink(other.path(), at("n_r_u")).expect("linked");
        symlink("nowhere", at("n_p_u/main/4.log")).expect("linked");
        nix::unistd::mkfifo(&at("n_p_u/main/5.log"), nix::sys::stat::Mode::S_IRWXU).expect("made");
        symlink(&root, dir.path().join("link")).expect("linked");
        let read = |root: &Path, log: &Path| {
            let place = LogLocation::find(root, log).map_err(|error| match error {
                PlaceError::Outside { .. } => "outside",
                PlaceError::Resolve { .. } => "nowhere",
            })?;
            let file = place.open(&place.path).map_err(|_| "no file")?;
            io::read_to_string(file).map_err(|_| "unreadable")
        };
        for (log, expected) in [
            ("n_p_u/main/0.log", Ok("n_p_u/main")),
            ("n_p_u/main/3.log", Ok("n_p_u/main")),
            ("n_p_u/main/1.log", Err("outside")),
            ("n_p_u/main/2.log", Err("outside")),
            ("n_p_u/out/secret", Err("outside")),
            ("n_r_u/secret", Err("outside")),
            ("n_p_u/../n_q_u/main/0.log", Err("outside")),
            ("../secret", Err("outside")),
            ("n_p_u/main/4.log", Err("nowhere")),
            ("n_p_u/main/5.log", Err("no file")),
            ("n_p_u/main", Err("no file")),
        ] {
            assert_eq!(read(&root, &at(log)), expected.map(str::to_owned), "{log}");
        }
        assert_eq!(read(&root, Path::new("/etc/passwd")), Err("outside"));
        // The root directory itself may be a link that the administrator created.
        let link = dir.path().join("link");
        assert_eq!(read(&link, &link.join("n_p_u/main/0.log")), Ok("n_p_u/main".to_owned()));
        assert_eq!(read(&link, &at("n_p_u/main/0.log")), Ok("n_p_u/main".to_owned()));
    }

    #[test]
    fn a_file_that_is_swapped_for_a_link_is_not_opened() {
        let dir = tempfile::tempdir().expect("a directory");
        let log = dir.path().join("n_p_u/0.log");
        fs::create_dir(dir.path().join("n_p_u")).expect("made");
        fs::write(&log, "x").expect("written");
        let place = LogLocation::find(dir.path(), &log).expect("a log");
        fs::remove_file(&log).expect("removed");
        symlink("/etc/passwd", &log).expect("linked");
        assert!(place.open(&place.path).is_err());
        assert!(place.open(Path::new("/etc/passwd")).is_err());
    }
}
