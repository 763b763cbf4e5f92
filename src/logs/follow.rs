//! Waiting for a log to grow, and finding the file that comes after it.
//!
//! The directory is watched, since a rename would lose a watch on the file. Where no watch can be
//! had (the kernel's limit), the tick alone drives the reader.

use std::{
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use futures::StreamExt;
use inotify::{EventStream, Inotify, WatchMask};
use tokio::{fs::File, time::timeout};
use tracing::debug;

use super::{dirs, own::Place, rotated};

/// Re-check after this time without any event.
const TICK: Duration = Duration::from_secs(1);

/// A watch on a directory.
pub struct Watch {
    events: Option<EventStream<Vec<u8>>>,
}

impl Watch {
    /// Watches the directory of a log, from now on.
    pub fn new(log: &Path) -> Self {
        let events = log.parent().ok_or(io::ErrorKind::InvalidInput.into()).and_then(watch);
        if let Err(error) = &events {
            debug!(path = %log.display(), err = %error, "Cannot watch the directory of a log");
        }
        Self { events: events.ok() }
    }

    /// Waits for a change in the directory, at most for one tick.
    pub async fn changed(&mut self) {
        let Some(events) = &mut self.events else {
            tokio::time::sleep(TICK).await;
            return;
        };
        let mut bursts = events.ready_chunks(64);
        match timeout(TICK, bursts.next()).await {
            Ok(Some(burst)) if burst.iter().any(Result::is_ok) => {}
            Err(_) => {}
            // A watch that fails would spin; the tick goes on without it.
            Ok(_) => self.events = None,
        }
    }
}

fn watch(directory: &Path) -> io::Result<EventStream<Vec<u8>>> {
    let inotify = Inotify::init()?;
    let mask = WatchMask::MODIFY | WatchMask::CREATE | WatchMask::MOVE | WatchMask::DELETE | WatchMask::ATTRIB;
    inotify.watches().add(directory, mask)?;
    inotify.into_event_stream(vec![0; 4096])
}

/// A log file that is open, and which file on disk it is.
pub struct OpenLog {
    /// To read from.
    pub file: File,
    identity: (u64, u64),
}

impl OpenLog {
    /// Opens a regular file of a log's place.
    ///
    /// # Errors
    /// It cannot be opened, or is something else.
    pub async fn open(place: &Place, path: &Path) -> io::Result<Self> {
        let (place, path) = (place.clone(), path.to_owned());
        let opened = tokio::task::spawn_blocking(move || regular(&place, &path)).await.map_err(io::Error::other)?;
        let (file, identity) = opened?;
        let mut file = File::from_std(file);
        file.set_max_buf_size(super::read::CHUNK);
        Ok(Self { file, identity })
    }

    /// The file that was begun after this one: the next rotated one where there were several
    /// rotations, else the one that is written now; `None` while this one is.
    pub async fn successor(&self, log: &Path) -> Option<Successor> {
        let (log, mine) = (log.to_owned(), self.identity);
        let found = tokio::task::spawn_blocking(move || {
            let path = next_file(&log, mine)?;
            Some(Successor { identity: identity(&path)?, path })
        });
        found.await.ok().flatten()
    }

    /// Whether this is the file that was meant: another rotation may have taken its name.
    pub fn is(&self, meant: &Successor) -> bool {
        self.identity == meant.identity
    }
}

/// The file that comes after one that was rotated.
pub struct Successor {
    /// Its name, for now.
    pub path: PathBuf,
    identity: (u64, u64),
}

fn regular(place: &Place, path: &Path) -> io::Result<(std::fs::File, (u64, u64))> {
    let file = place.open(path)?;
    let meta = file.metadata()?;
    Ok((file, (meta.dev(), meta.ino())))
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.dev(), meta.ino()))
}

fn next_file(log: &Path, mine: (u64, u64)) -> Option<PathBuf> {
    // Absent between rename and reopen: nothing follows yet.
    if identity(log)? == mine {
        return None;
    }
    let names = rotated::oldest_first(dirs::beside(log, ".").unwrap_or_default());
    let files: Vec<PathBuf> = names.into_iter().map(|name| log.with_file_name(name)).collect();
    let at = files.iter().position(|path| identity(path) == Some(mine));
    let later = at.and_then(|at| files.get(at + 1..)).unwrap_or_default();
    let plain = later.iter().find(|path| path.extension().is_none_or(|e| e != "gz"));
    Some(plain.cloned().unwrap_or_else(|| log.to_owned()))
}
