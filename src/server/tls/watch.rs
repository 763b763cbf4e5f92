//! Notices that one of the files may have changed.
//!
//! Directories are watched, not files: certificates are replaced by renaming, and mounted ones by
//! turning a link (`..data`) to another directory. What is missed here the periodic look finds.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    path::{Path, PathBuf},
};

use futures::StreamExt;
use inotify::{Event, EventMask, EventStream, Inotify, WatchMask};
use tracing::debug;

use super::TlsSettings;

/// Directories under watch.
pub struct Watch {
    events: Option<EventStream<Vec<u8>>>,
    directories: BTreeSet<PathBuf>,
    names: BTreeSet<OsString>,
}

impl Watch {
    /// Begins; what cannot be watched is tried again with [`Watch::arm`].
    pub fn new(settings: &TlsSettings) -> Self {
        let files = [Some(&settings.cert_file), Some(&settings.key_file), settings.client_ca_file.as_ref()];
        let files: Vec<&PathBuf> = files.into_iter().flatten().collect();
        let parent = |file: &&PathBuf| match file.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        let mut watch = Self {
            events: None,
            directories: files.iter().map(parent).collect(),
            names: files.iter().filter_map(|file| Path::file_name(file)).map(OsString::from).collect(),
        };
        watch.arm();
        watch
    }

    /// Watches what exists now: a directory may have come, or have been replaced.
    pub fn arm(&mut self) {
        if self.events.is_none() {
            let made = Inotify::init().and_then(|inotify| inotify.into_event_stream(vec![0; 4096]));
            self.events = made.map_err(|error| debug!(err = %error, "No file notifications")).ok();
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
                debug!(path = %directory.display(), err = %error, "Cannot watch a directory");
            }
        }
    }

    /// Returns when something happened to one of the names. Safe to drop while waiting.
    pub async fn moved(&mut self) {
        loop {
            let Some(events) = &mut self.events else { return std::future::pending().await };
            match events.next().await {
                Some(Ok(event)) if self.counts(&event) => return,
                Some(Ok(_)) => {}
                Some(Err(_)) | None => self.events = None, // made anew by the next `arm`
            }
        }
    }

    fn counts(&self, event: &Event<OsString>) -> bool {
        let lost = EventMask::Q_OVERFLOW | EventMask::IGNORED | EventMask::UNMOUNT;
        event.mask.intersects(lost)
            || event.name.as_ref().is_some_and(|name| {
                self.names.contains(name) || name.to_string_lossy().starts_with("..") // a mounted volume turns
            })
    }
}
