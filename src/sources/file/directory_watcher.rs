//! inotify watch of the static pod directory.
//!
//! A file counts as changed when its writer closes it, not at every write: half a manifest can be a
//! valid one. A writer that never closes the file is covered by the periodic list.

use std::{ffi::OsString, io, path::PathBuf};

use futures::StreamExt;
use inotify::{Event, EventMask, EventStream, Inotify};

use super::manifest_reader::is_ignored;

/// Change of the static pod directory or file, derived from inotify events.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DirectoryChange {
    /// A name appeared; its content may still be being written.
    Created(PathBuf),
    /// A file has new content or metadata.
    Changed(PathBuf),
    /// A name disappeared.
    Gone(PathBuf),
    /// Anything may have changed: the event queue overflowed, or a single watched file changed.
    Everything,
    /// The watch is lost: the directory was removed or moved, or reading failed.
    Lost,
}

/// A watch that is not read yet; created on the blocking pool.
pub struct PreparedWatch {
    /// The inotify instance.
    pub inotify: Inotify,
    /// Path of the directory.
    pub directory: PathBuf,
    /// Device and inode of the directory.
    pub identity: (u64, u64),
    /// The only relevant name, for a single file.
    pub only: Option<OsString>,
}

/// A running watch.
pub struct Watch {
    events: EventStream<Vec<u8>>,
    directory: PathBuf,
    identity: (u64, u64),
    only: Option<OsString>,
}

impl Watch {
    /// Starts reading events.
    ///
    /// # Errors
    /// The descriptor cannot be polled.
    pub fn start(prepared: PreparedWatch) -> io::Result<Self> {
        let PreparedWatch { inotify, directory, identity, only } = prepared;
        Ok(Self { events: inotify.into_event_stream(vec![0; 4096])?, directory, identity, only })
    }

    /// Device and inode of the watched directory.
    pub fn directory(&self) -> (u64, u64) {
        self.identity
    }

    /// Waits for the next relevant change. Cancel-safe.
    pub async fn next(&mut self) -> DirectoryChange {
        loop {
            match self.events.next().await {
                Some(Ok(event)) => {
                    if let Some(noticed) = self.change_of(event) {
                        return noticed;
                    }
                }
                Some(Err(_)) | None => return DirectoryChange::Lost,
            }
        }
    }

    fn change_of(&self, event: Event<OsString>) -> Option<DirectoryChange> {
        let mask = event.mask;
        if mask.contains(EventMask::Q_OVERFLOW) {
            return Some(DirectoryChange::Everything);
        }
        let ends = EventMask::DELETE_SELF | EventMask::MOVE_SELF | EventMask::IGNORED | EventMask::UNMOUNT;
        if mask.intersects(ends) {
            return Some(DirectoryChange::Lost);
        }
        let name = event.name?;
        if mask.contains(EventMask::ISDIR) || self.only.as_ref().is_some_and(|only| *only != name) {
            return None;
        }
        let path = self.directory.join(name);
        if self.only.is_some() {
            // A single file is read as a whole, with the rules of the list.
            return Some(DirectoryChange::Everything);
        }
        if is_ignored(&path) {
            return None;
        }
        Some(if mask.intersects(EventMask::DELETE | EventMask::MOVED_FROM) {
            DirectoryChange::Gone(path)
        } else if mask.contains(EventMask::CREATE) {
            DirectoryChange::Created(path)
        } else {
            DirectoryChange::Changed(path)
        })
    }
}
