//! What inotify tells about the directory with the manifests.
//!
//! A file counts as changed when its writer closes it, not with every write: half a manifest can
//! be a valid one. A writer that never closes is found by the periodic list.

use std::{ffi::OsString, io, path::PathBuf};

use futures::StreamExt;
use inotify::{Event, EventMask, EventStream, Inotify};

use super::look::is_ignored;

/// Something that happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Noticed {
    /// A name appeared; its content may still be written.
    Created(PathBuf),
    /// A file has new content or another mode.
    Changed(PathBuf),
    /// A name is gone.
    Gone(PathBuf),
    /// More happened than the kernel could remember.
    Everything,
    /// The watch is gone: so is the directory, or it moved, or reading failed.
    Lost,
}

/// A watch that is not read yet; made on the blocking pool.
pub struct Prepared {
    /// The kernel's side.
    pub inotify: Inotify,
    /// The directory.
    pub directory: PathBuf,
    /// Its device and inode.
    pub identity: (u64, u64),
    /// The only name that counts.
    pub only: Option<OsString>,
}

/// A watch at work.
pub struct Watch {
    events: EventStream<Vec<u8>>,
    directory: PathBuf,
    identity: (u64, u64),
    only: Option<OsString>,
}

impl Watch {
    /// Starts to read.
    ///
    /// # Errors
    /// If the descriptor cannot be polled.
    pub fn start(prepared: Prepared) -> io::Result<Self> {
        let Prepared { inotify, directory, identity, only } = prepared;
        Ok(Self { events: inotify.into_event_stream(vec![0; 4096])?, directory, identity, only })
    }

    /// Device and inode of the directory that is watched.
    pub fn directory(&self) -> (u64, u64) {
        self.identity
    }

    /// The next thing that counts. Safe to drop while waiting.
    pub async fn next(&mut self) -> Noticed {
        loop {
            match self.events.next().await {
                Some(Ok(event)) => {
                    if let Some(noticed) = self.told(event) {
                        return noticed;
                    }
                }
                Some(Err(_)) | None => return Noticed::Lost,
            }
        }
    }

    fn told(&self, event: Event<OsString>) -> Option<Noticed> {
        let mask = event.mask;
        if mask.contains(EventMask::Q_OVERFLOW) {
            return Some(Noticed::Everything);
        }
        let ends = EventMask::DELETE_SELF | EventMask::MOVE_SELF | EventMask::IGNORED | EventMask::UNMOUNT;
        if mask.intersects(ends) {
            return Some(Noticed::Lost);
        }
        let name = event.name?;
        if mask.contains(EventMask::ISDIR) || self.only.as_ref().is_some_and(|only| *only != name) {
            return None;
        }
        let path = self.directory.join(name);
        if self.only.is_some() {
            // A single file is looked at as a whole, with the list's rules.
            return Some(Noticed::Everything);
        }
        if is_ignored(&path) {
            return None;
        }
        Some(if mask.intersects(EventMask::DELETE | EventMask::MOVED_FROM) {
            Noticed::Gone(path)
        } else if mask.contains(EventMask::CREATE) {
            Noticed::Created(path)
        } else {
            Noticed::Changed(path)
        })
    }
}
