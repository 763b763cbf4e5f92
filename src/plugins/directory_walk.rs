//! Directory walk for plugin sockets. Blocking. Spec 06c §2.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
    time::SystemTime,
};

use inotify::{WatchDescriptor, WatchMask, Watches};
use tracing::debug;

/// Maximum number of sockets and of directories; `DEEPEST` is the maximum depth.
pub const MOST: usize = 1024;
const DEEPEST: usize = 8;

/// Identity of a socket, to detect a replacement under the same path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SocketIdentity {
    device: u64,
    inode: u64,
    /// Creation time, because inodes are reused at once; `None` if the file system does not provide it.
    created: Option<SystemTime>,
}

impl SocketIdentity {
    /// Whether the file system distinguishes successive sockets of one path.
    pub fn is_certain(&self) -> bool {
        self.created.is_some()
    }
}

/// Plugin sockets and watched directories below the root of a walk.
#[derive(Default)]
pub struct WalkResult {
    /// Sockets by path.
    pub sockets: BTreeMap<PathBuf, SocketIdentity>,
    /// Watched directories.
    pub directories: BTreeMap<PathBuf, WatchDescriptor>,
    /// Whether a limit was exceeded.
    pub is_cut: bool,
}

/// Walks everything below the directory, and watches all directories.
pub fn walk(root: &Path, mut watches: Watches) -> WalkResult {
    let mut found = WalkResult::default();
    let mut left = vec![(root.to_owned(), 0_usize)];
    let mask = WatchMask::CREATE
        | WatchMask::MOVED_TO
        | WatchMask::MOVED_FROM
        | WatchMask::DELETE
        | WatchMask::DELETE_SELF
        | WatchMask::ONLYDIR
        | WatchMask::DONT_FOLLOW;
    while let Some((directory, depth)) = left.pop() {
        if found.directories.len() >= MOST {
            found.is_cut = true;
            break;
        }
        // Watch before reading: changes in between are reported.
        match watches.add(&directory, mask) {
            Ok(descriptor) => drop(found.directories.insert(directory.clone(), descriptor)),
            Err(error) => debug!(path = %directory.display(), err = %error, "Failed to watch plugin directory"),
        }
        if let Err(error) = list(&directory, depth, &mut left, &mut found) {
            debug!(path = %directory.display(), err = %error, "Failed to read plugin directory");
        }
    }
    found
}

fn list(directory: &Path, depth: usize, left: &mut Vec<(PathBuf, usize)>, found: &mut WalkResult) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        // It may already be gone.
        let Ok(meta) = entry.metadata() else { continue };
        if meta.file_type().is_dir() && depth < DEEPEST && left.len() < MOST {
            left.push((entry.path(), depth.saturating_add(1)));
        } else if meta.file_type().is_socket() {
            if found.sockets.len() >= MOST {
                found.is_cut = true;
                return Ok(());
            }
            let identity = SocketIdentity { device: meta.dev(), inode: meta.ino(), created: meta.created().ok() };
            found.sockets.insert(entry.path(), identity);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use inotify::Inotify;

    use super::*;

    #[test]
    fn sockets_are_found_and_nothing_else() {
        // AC-06c-15
        let root = tempfile::tempdir().expect("a directory");
        let at = |name: &str| root.path().join(name);
        fs::create_dir_all(at("deep/er")).expect("directories");
        fs::create_dir_all(at(".hidden")).expect("directories");
        fs::write(at("file.sock"), "x").expect("a file");
        let _sockets: Vec<UnixListener> = ["a.sock", "deep/er/b", ".c.sock", ".hidden/d.sock"]
            .map(|name| UnixListener::bind(at(name)).expect("a socket"))
            .into_iter()
            .collect();
        std::os::unix::fs::symlink(at("a.sock"), at("link.sock")).expect("a link");
        let inotify = Inotify::init().expect("inotify");
        let found = walk(root.path(), inotify.watches());
        assert_eq!(found.sockets.keys().collect::<Vec<_>>(), [&at("a.sock"), &at("deep/er/b")]);
        assert_eq!(found.directories.len(), 3, "the hidden one is not watched");
        assert!(!found.is_cut);
        let before = found.sockets[&at("a.sock")];
        fs::remove_file(at("a.sock")).expect("removed");
        let _again = UnixListener::bind(at("a.sock")).expect("a socket");
        let after = walk(root.path(), inotify.watches()).sockets[&at("a.sock")];
        assert!(!after.is_certain() || before != after, "another one of that name");
    }
}
