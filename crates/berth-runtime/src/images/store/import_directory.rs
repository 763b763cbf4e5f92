//! Import directory for machines without a network: watches for image archives and imports each once.
//!
//! ```text
//!  startup ──────────────┐
//!  inotify: closed, moved┼─► list new archives ─► import ─► imported.json
//!  periodic ─────────────┘
//! ```
//! An archive counts as complete when its writer closes it or it is renamed into the directory; one found only by
//! listing, when it has not changed for ten seconds. `$ROOT/imported.json` records imported archives by name, length,
//! time, and inode, and those that failed: a failure is logged once and not retried until the file changes.
//! Implements spec 09b §7.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fs,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    sync::{Arc, PoisonError},
    time::{Duration, SystemTime},
};

use futures::StreamExt;
use inotify::{EventMask, EventStream, Inotify, WatchMask};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::{ImageStore, ImageStoreInner, ImportOptions, blocking};
use crate::{
    images::{
        error::{ImageError, ImageErrorKind, IoContext},
        progress::ImageProgress,
    },
    store::record::{self, Durability},
};

/// Maximum number of directory entries that are read.
const MOST: usize = 10_000;
/// Interval of listing the directory, independent of inotify.
const LIST_EVERY: Duration = Duration::from_secs(60);
/// How long an archive without an inotify event must be unchanged.
const QUIET: Duration = Duration::from_secs(10);
/// Debounce interval after an event.
const GATHER: Duration = Duration::from_millis(100);

/// Length, modification time in seconds and nanoseconds, inode.
type FileIdentity = (u64, i64, i64, u64);

#[derive(Serialize, Deserialize, Default, Clone, PartialEq)]
struct ImportRecord {
    v: u64,
    archives: BTreeMap<String, FileIdentity>,
    /// Archives whose import failed.
    #[serde(default)]
    refused: BTreeMap<String, FileIdentity>,
}

/// Which archives are complete.
#[derive(Clone, PartialEq, Eq, Debug)]
enum CompleteArchives {
    /// All: nothing is being written.
    All,
    /// These, and those that have been unchanged for [`QUIET`].
    Named(BTreeSet<OsString>),
}

impl ImageStore {
    /// Imports the archives (`*.tar*`) of a directory that were not imported before; returns their number, 0 if the
    /// directory does not exist.
    ///
    /// # Errors
    /// The directory cannot be listed, or `imported.json` cannot be written.
    pub async fn import_folder(&self, folder: &Path) -> Result<usize, ImageError> {
        self.import_complete(folder, CompleteArchives::All).await
    }

    async fn import_complete(&self, folder: &Path, complete: CompleteArchives) -> Result<usize, ImageError> {
        let (inner, folder) = (Arc::clone(&self.inner), folder.to_owned());
        blocking(move || inner.import_folder(&folder, &complete)).await
    }

    /// Creates the directory if it is missing, and imports archives as they appear; never returns.
    pub async fn watch_folder(&self, folder: &Path) {
        if let Err(error) = fs::DirBuilder::new().recursive(true).mode(0o700).create(folder) {
            warn!(path = %folder.display(), err = %error, "Failed to create image import directory");
        }
        let mut watch = DirectoryWatch { folder, events: None };
        watch.arm();
        let mut complete = CompleteArchives::Named(BTreeSet::new());
        loop {
            // A failure of the whole import is logged every time: it concerns the directory or the disk.
            if let Err(error) = self.import_complete(folder, complete).await {
                warn!(path = %folder.display(), err = %error, "Failed to import image archives");
            }
            complete = CompleteArchives::Named(watch.completed().await);
        }
    }
}

/// Inotify watch of the directory.
struct DirectoryWatch<'a> {
    folder: &'a Path,
    events: Option<EventStream<Vec<u8>>>,
}

impl DirectoryWatch<'_> {
    /// Creates the watch; the directory may be new or have been replaced.
    fn arm(&mut self) {
        let mask = WatchMask::CLOSE_WRITE | WatchMask::MOVED_TO | WatchMask::ONLYDIR;
        let made = Inotify::init().and_then(|inotify| inotify.into_event_stream(vec![0; 4096]));
        let armed = made.and_then(|events| {
            events.watches().add(self.folder, mask)?;
            Ok(events)
        });
        // Without a watch the periodic listing finds the archives.
        self.events = armed
            .map_err(
                |error| debug!(path = %self.folder.display(), err = %error, "Failed to watch image import directory"),
            )
            .ok();
    }

    /// Names of completed files; empty when the listing interval ends.
    async fn completed(&mut self) -> BTreeSet<OsString> {
        let mut names = BTreeSet::new();
        let mut until = Instant::now() + LIST_EVERY;
        loop {
            let Some(events) = &mut self.events else {
                tokio::time::sleep_until(until).await;
                self.arm();
                return names;
            };
            match tokio::time::timeout_at(until, events.next()).await {
                Err(_) => return names,
                Ok(Some(Ok(event))) => {
                    if event.mask.intersects(EventMask::IGNORED | EventMask::UNMOUNT | EventMask::Q_OVERFLOW) {
                        self.events = None; // recreated at the next listing
                    }
                    names.extend(event.name);
                    until = until.min(Instant::now() + GATHER);
                }
                Ok(Some(Err(_)) | None) => self.events = None,
            }
        }
    }
}

impl ImageStoreInner {
    fn import_folder(&self, folder: &Path, complete: &CompleteArchives) -> Result<usize, ImageError> {
        // One import at a time: a second caller finds nothing new.
        let _importing = self.importing.lock().unwrap_or_else(PoisonError::into_inner);
        let path = self.settings.root.join("imported.json");
        let known = record::read::<ImportRecord>(&path).ok().flatten().unwrap_or_default();
        let mut now = ImportRecord { v: record::VERSION, ..ImportRecord::default() };
        let mut count = 0;
        for archive in archives_of(folder)? {
            let Ok(stat) = fs::metadata(&archive) else { continue };
            let name = archive.to_string_lossy().into_owned();
            let facts = (stat.len(), stat.mtime(), stat.mtime_nsec(), stat.ino());
            let is = |list: &BTreeMap<String, FileIdentity>| list.get(&name) == Some(&facts);
            if is(&known.archives) {
                now.archives.insert(name, facts);
            } else if is(&known.refused) {
                now.refused.insert(name, facts);
            } else if is_complete(&archive, &stat, complete) {
                match self.import(&archive, &ImportOptions::default(), &ImageProgress::default()) {
                    Ok(images) => {
                        info!(path = %name, images = images.len(), "Imported image archive");
                        now.archives.insert(name, facts);
                        count += 1;
                    }
                    Err(error) => {
                        warn!(path = %name, err = %error, "Failed to import image archive");
                        // Retry later when there may be space.
                        if error.kind != ImageErrorKind::ResourceExhausted {
                            now.refused.insert(name, facts);
                        }
                    }
                }
            }
        }
        if now != known {
            record::write(&path, &now, Durability::Synced).attempt("write imported.json")?;
        }
        Ok(count)
    }
}

fn is_complete(archive: &Path, stat: &fs::Metadata, complete: &CompleteArchives) -> bool {
    let CompleteArchives::Named(names) = complete else { return true };
    let is_quiet = || {
        let age = stat.modified().ok().and_then(|at| SystemTime::now().duration_since(at).ok());
        age.is_some_and(|age| age >= QUIET)
    };
    archive.file_name().is_some_and(|name| names.contains(name)) || is_quiet()
}

fn archives_of(folder: &Path) -> Result<Vec<PathBuf>, ImageError> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.attempt(format!("list {}", folder.display()))?,
    };
    let paths = entries.take(MOST).flatten().map(|entry| entry.path());
    let is_archive = |path: &PathBuf| {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        !name.starts_with('.') && name.contains(".tar") && path.is_file()
    };
    let mut out: Vec<PathBuf> = paths.filter(is_archive).collect();
    out.sort();
    Ok(out)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{
        super::tests::{is_root, layer, oci, opened},
        *,
    };

    /// Waits for a condition that the watcher brings about.
    async fn until(what: &str, is: impl Fn() -> bool) {
        let begun = std::time::Instant::now();
        while !is() {
            assert!(begun.elapsed() < Duration::from_secs(10), "{what}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    #[tokio::test]
    async fn archives_are_imported_as_they_appear_and_bad_ones_once() {
        if !is_root() {
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let (root, folder) = (dir.path().join("root"), dir.path().join("archives/deep"));
        let store = opened(&root).await;
        let (watching, watched) = (store.clone(), folder.clone());
        let watch = tokio::spawn(async move { watching.watch_folder(&watched).await });
        until("the directory is made", || folder.is_dir()).await;
        let here = |name: &str| store.status(name).expect("a name").is_some();
        let archive = |name: &str| oci(name, &[layer(&[("f", name)])], "");
        // Renamed into the directory; written in it slowly.
        fs::write(dir.path().join("a.tar"), archive("x.tld/a:1")).expect("writable");
        fs::rename(dir.path().join("a.tar"), folder.join("a.tar")).expect("renamed");
        until("a is here", || here("x.tld/a:1")).await;
        let bytes = archive("x.tld/b:1");
        let (half, rest) = bytes.split_at(bytes.len() / 2);
        let mut file = fs::File::create(folder.join("b.tar")).expect("makeable");
        std::io::Write::write_all(&mut file, half).expect("writable");
        fs::write(dir.path().join("c.tar"), archive("x.tld/c:1")).expect("writable");
        fs::rename(dir.path().join("c.tar"), folder.join("c.tar")).expect("renamed");
        until("c is here", || here("x.tld/c:1")).await;
        let noted = || record::read::<ImportRecord>(&root.join("imported.json")).ok().flatten().unwrap_or_default();
        assert!(noted().refused.is_empty(), "half an archive is none yet");
        std::io::Write::write_all(&mut file, rest).expect("writable");
        drop(file);
        until("b is here", || here("x.tld/b:1")).await;
        // An archive that cannot be imported is recorded until it changes.
        fs::write(folder.join("d.tar"), "nothing of the kind").expect("writable");
        until("d is refused", || noted().refused.len() == 1).await;
        assert_eq!(store.import_folder(&folder).await.expect("nothing new"), 0);
        assert_eq!((noted().refused.len(), noted().archives.len()), (1, 3));
        fs::write(folder.join("d.tar"), archive("x.tld/d:1")).expect("writable");
        until("d is here", || here("x.tld/d:1")).await;
        until("d is noted", || noted().refused.is_empty() && noted().archives.len() == 4).await;
        watch.abort();
    }
}
