//! inotify watcher of a set of files, e.g. certificates; also through links and renames.
//!
//! Watches directories, not files: certificates are replaced by rename, and mounted ones by redirecting a link
//! (`..data`) to another directory. The caller also checks periodically: a missed change must be found all the same.

use std::{collections::BTreeSet, ffi::OsString, path::PathBuf};

use futures::StreamExt;
use inotify::{Event, EventMask, EventStream, Inotify, WatchMask};
use tracing::debug;

/// A set of watched directories.
pub struct FileWatch {
    events: Option<EventStream<Vec<u8>>>,
    directories: BTreeSet<PathBuf>,
    names: BTreeSet<OsString>,
}

impl FileWatch {
    /// Starts watching; [`FileWatch::arm`] retries what cannot be watched.
    pub fn new(files: Vec<PathBuf>) -> Self {
        // The target of a link may be replaced as well as the link.
        let real = files.iter().filter_map(|file| file.canonicalize().ok());
        let all: Vec<PathBuf> = real.chain(files.iter().cloned()).collect();
        let parent = |file: &PathBuf| match file.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        let mut watch = Self {
            events: None,
            directories: all.iter().map(parent).collect(),
            names: all.iter().filter_map(|file| file.file_name()).map(OsString::from).collect(),
        };
        watch.arm();
        watch
    }

    /// Watches what exists now: a directory may have been created or replaced.
    pub fn arm(&mut self) {
        if self.directories.is_empty() {
            return;
        }
        if self.events.is_none() {
            let made = Inotify::init().and_then(|inotify| inotify.into_event_stream(vec![0; 4096]));
            self.events = made.map_err(|error| debug!(err = %error, "Failed to initialize inotify")).ok();
        }
        let Some(events) = &self.events else { return };
        let mask = WatchMask::CREATE
            | WatchMask::CLOSE_WRITE
            | WatchMask::MOVED_TO
            | WatchMask::MOVED_FROM
            | WatchMask::DELETE
            | WatchMask::ONLYDIR;
        let mut watches = events.watches();
        for directory in &self.directories {
            if let Err(error) = watches.add(directory, mask) {
                debug!(path = %directory.display(), err = %error, "Failed to watch directory");
            }
        }
    }

    /// Waits for a change of one of the names. Cancel-safe.
    pub async fn changed(&mut self) {
        loop {
            let Some(events) = &mut self.events else { return std::future::pending().await };
            match events.next().await {
                Some(Ok(event)) if self.is_relevant(&event) => return,
                Some(Ok(_)) => {}
                Some(Err(_)) | None => self.events = None, // recreated by the next `arm`
            }
        }
    }

    fn is_relevant(&self, event: &Event<OsString>) -> bool {
        let lost = EventMask::Q_OVERFLOW | EventMask::IGNORED | EventMask::UNMOUNT;
        event.mask.intersects(lost)
            || event.name.as_ref().is_some_and(|name| {
                self.names.contains(name) || name.to_string_lossy().starts_with("..") // update of a mounted volume
            })
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, path::Path, time::Duration};

    use tokio::time::timeout;

    use super::*;

    async fn noticed(watch: &mut FileWatch, change: &str) {
        timeout(Duration::from_secs(60), watch.changed()).await.expect(change);
        // One change may cause several notifications.
        while timeout(Duration::from_millis(50), watch.changed()).await.is_ok() {}
    }

    fn replace(file: &Path) {
        let new = file.with_extension("new");
        fs::write(&new, "x").expect("written");
        fs::rename(new, file).expect("renamed");
    }

    #[tokio::test]
    async fn changes_of_the_files_are_noticed_and_no_others() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("real")).expect("made");
        fs::write(at("real/pair.pem"), "x").expect("written");
        symlink(at("real/pair.pem"), at("current.pem")).expect("linked");
        let mut watch = FileWatch::new(vec![at("current.pem"), at("absent/ca.pem"), at("ca.pem")]);

        fs::write(at("other"), "x").expect("written");
        fs::write(at("real/other"), "x").expect("written");
        assert!(timeout(Duration::from_millis(50), watch.changed()).await.is_err(), "another file");

        replace(&at("real/pair.pem"));
        noticed(&mut watch, "what a link leads to").await;
        fs::remove_file(at("current.pem")).expect("removed");
        noticed(&mut watch, "the link").await;
        fs::write(at("ca.pem"), "x").expect("written");
        noticed(&mut watch, "a file that was not there").await;
        symlink("real", at("..data")).expect("linked");
        noticed(&mut watch, "a mounted volume").await;

        fs::create_dir(at("absent")).expect("made");
        watch.arm();
        replace(&at("absent/ca.pem"));
        noticed(&mut watch, "a directory that was not there").await;
    }

    #[tokio::test]
    async fn nothing_is_waited_for_in_vain() {
        let mut watch = FileWatch::new(Vec::new());
        assert!(timeout(Duration::from_millis(10), watch.changed()).await.is_err());
    }
}
