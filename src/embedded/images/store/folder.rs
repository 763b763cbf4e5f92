//! A directory of archives for machines without a network: whatever lies in it at start is imported, once.
//!
//! `$ROOT/imported.json` remembers what was imported by name, length, time and inode. An archive that cannot be imported is told
//! and tried again at the next start. Behaviour: spec 09b §7.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use super::{ImageStore, Inner, blocking};
use crate::embedded::{
    images::error::{Attempt, ImageError},
    store::record::{self, Durability},
};

/// Most archives that are looked at.
const MOST: usize = 10_000;

#[derive(Serialize, Deserialize)]
struct Imported {
    v: u64,
    archives: BTreeMap<String, (u64, i64, i64, u64)>,
}

impl ImageStore {
    /// Imports the archives (`*.tar*`) of a directory that were not imported before; how many. A directory that is not there has
    /// none.
    ///
    /// # Errors
    /// Where the directory cannot be listed, or what was imported cannot be written down.
    pub async fn import_folder(&self, folder: &Path) -> Result<usize, ImageError> {
        let (inner, folder) = (Arc::clone(&self.inner), folder.to_owned());
        blocking(move || inner.import_folder(&folder)).await
    }
}

impl Inner {
    fn import_folder(&self, folder: &Path) -> Result<usize, ImageError> {
        let path = self.settings.root.join("imported.json");
        let known = record::read::<Imported>(&path).ok().flatten().map(|known| known.archives).unwrap_or_default();
        let mut archives = BTreeMap::new();
        let mut count = 0;
        for archive in archives_of(folder)? {
            let Ok(stat) = fs::metadata(&archive) else { continue };
            let name = archive.to_string_lossy().into_owned();
            let facts = (stat.len(), stat.mtime(), stat.mtime_nsec(), stat.ino());
            if known.get(&name) != Some(&facts) {
                match self.import(&archive, None) {
                    Ok(images) => info!(path = %name, images = images.len(), "Archive imported"),
                    Err(error) => {
                        warn!(path = %name, error = %error, "Archive cannot be imported");
                        continue;
                    }
                }
                count += 1;
            }
            archives.insert(name, facts);
        }
        if archives != known {
            let imported = Imported { v: record::VERSION, archives };
            record::write(&path, &imported, Durability::Synced).attempt("write imported.json")?;
        }
        Ok(count)
    }
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
