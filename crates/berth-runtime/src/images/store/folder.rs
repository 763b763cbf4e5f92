//! A directory of archives for machines without a network: whatever lies in it, or comes to lie in it, is imported, once.
//!
//! ```text
//!  start ───────────────┐
//!  closed, renamed ─────┼─► list what is new ─► import ─► imported.json
//!  now and then ────────┘
//! ```
//! An archive counts as complete when its writer closes it or it is renamed into the directory; one that only the listing
//! finds, when it has not changed for a while. `$ROOT/imported.json` remembers what was imported by name, length, time and
//! inode, and what cannot be: that is told once and not tried again until it changes. Behaviour: spec 09b §7.

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

use super::{Choice, ImageStore, Inner, blocking};
use crate::{
    images::{
        error::{Attempt, ImageError, Kind},
        progress::Progress,
    },
    store::record::{self, Durability},
};

/// Most archives that are looked at.
const MOST: usize = 10_000;
/// How often the directory is listed whatever was heard.
const LIST_EVERY: Duration = Duration::from_secs(60);
/// How long an archive nobody told of must have been left alone.
const QUIET: Duration = Duration::from_secs(10);
/// How long more news are waited for.
const GATHER: Duration = Duration::from_millis(100);

/// Length, time of the last change in seconds and nanoseconds, inode.
type Facts = (u64, i64, i64, u64);

#[derive(Serialize, Deserialize, Default, Clone, PartialEq)]
struct Imported {
    v: u64,
    archives: BTreeMap<String, Facts>,
    /// What cannot be imported as it is.
    #[serde(default)]
    refused: BTreeMap<String, Facts>,
}

/// Which archives are complete.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Complete {
    /// All: nobody writes now.
    All,
    /// These, and those that have not changed for a while.
    Told(BTreeSet<OsString>),
}

impl ImageStore {
    /// Imports the archives (`*.tar*`) of a directory that were not imported before; how many. A directory that is not there has
    /// none.
    ///
    /// # Errors
    /// Where the directory cannot be listed, or what was imported cannot be written down.
    pub async fn import_folder(&self, folder: &Path) -> Result<usize, ImageError> {
        self.import_complete(folder, Complete::All).await
    }

    async fn import_complete(&self, folder: &Path, complete: Complete) -> Result<usize, ImageError> {
        let (inner, folder) = (Arc::clone(&self.inner), folder.to_owned());
        blocking(move || inner.import_folder(&folder, &complete)).await
    }

    /// Makes the directory where it is missing, and imports archives as they come to lie in it; never returns.
    pub async fn watch_folder(&self, folder: &Path) {
        if let Err(error) = fs::DirBuilder::new().recursive(true).mode(0o700).create(folder) {
            warn!(path = %folder.display(), err = %error, "Directory of archives cannot be made");
        }
        let mut watch = Watch { folder, events: None };
        watch.arm();
        let mut complete = Complete::Told(BTreeSet::new());
        loop {
            // What fails as a whole is told again each time: it is the directory, or the disk.
            if let Err(error) = self.import_complete(folder, complete).await {
                warn!(path = %folder.display(), err = %error, "Archives cannot be imported");
            }
            complete = Complete::Told(watch.news().await);
        }
    }
}

/// What happens in the directory.
struct Watch<'a> {
    folder: &'a Path,
    events: Option<EventStream<Vec<u8>>>,
}

impl Watch<'_> {
    /// The directory may have come, or have been replaced.
    fn arm(&mut self) {
        let mask = WatchMask::CLOSE_WRITE | WatchMask::MOVED_TO | WatchMask::ONLYDIR;
        let made = Inotify::init().and_then(|inotify| inotify.into_event_stream(vec![0; 4096]));
        let armed = made.and_then(|events| {
            events.watches().add(self.folder, mask)?;
            Ok(events)
        });
        // The listing finds what nobody tells.
        self.events = armed.map_err(|error| debug!(path = %self.folder.display(), err = %error, "Not watched")).ok();
    }

    /// Names of files that were completed; empty where it is only time to list.
    async fn news(&mut self) -> BTreeSet<OsString> {
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
                        self.events = None; // made anew at the next listing
                    }
                    names.extend(event.name);
                    until = until.min(Instant::now() + GATHER);
                }
                Ok(Some(Err(_)) | None) => self.events = None,
            }
        }
    }
}

impl Inner {
    fn import_folder(&self, folder: &Path, complete: &Complete) -> Result<usize, ImageError> {
        // One at a time: who comes second finds nothing new.
        let _importing = self.importing.lock().unwrap_or_else(PoisonError::into_inner);
        let path = self.settings.root.join("imported.json");
        let known = record::read::<Imported>(&path).ok().flatten().unwrap_or_default();
        let mut now = Imported { v: record::VERSION, ..Imported::default() };
        let mut count = 0;
        for archive in archives_of(folder)? {
            let Ok(stat) = fs::metadata(&archive) else { continue };
            let name = archive.to_string_lossy().into_owned();
            let facts = (stat.len(), stat.mtime(), stat.mtime_nsec(), stat.ino());
            let is = |list: &BTreeMap<String, Facts>| list.get(&name) == Some(&facts);
            if is(&known.archives) {
                now.archives.insert(name, facts);
            } else if is(&known.refused) {
                now.refused.insert(name, facts);
            } else if is_complete(&archive, &stat, complete) {
                match self.import(&archive, &Choice::default(), &Progress::default()) {
                    Ok(images) => {
                        info!(path = %name, images = images.len(), "Archive imported");
                        now.archives.insert(name, facts);
                        count += 1;
                    }
                    Err(error) => {
                        warn!(path = %name, err = %error, "Archive cannot be imported");
                        // There may be room later.
                        if error.kind != Kind::ResourceExhausted {
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

fn is_complete(archive: &Path, stat: &fs::Metadata, complete: &Complete) -> bool {
    let Complete::Told(names) = complete else { return true };
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

    /// Waits for what the watch does; nothing is told when it is done.
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
        // Renamed into it, and written in it, slowly.
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
        let noted = || record::read::<Imported>(&root.join("imported.json")).ok().flatten().unwrap_or_default();
        assert!(noted().refused.is_empty(), "half an archive is none yet");
        std::io::Write::write_all(&mut file, rest).expect("writable");
        drop(file);
        until("b is here", || here("x.tld/b:1")).await;
        // One that cannot be imported is remembered, until it changes.
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
