//! Directory of record files with a write-through cache (spec 03b §3.1, §3.3 item 5).
//!
//! Blocking; called from the blocking pool. While the cache has never evicted an entry it is complete,
//! and a miss needs no disk access.

use std::{
    fs, io,
    num::NonZeroUsize,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use lru::LruCache;
use sha2::{Digest, Sha256};
use tracing::warn;

use super::record_documents::{DecodedDocument, RecordError};
use berth_metrics::RecordGauges;
use berth_sys::atomic_file::{read, replace};

const MODE: u32 = 0o600;

/// Key and encoding of one kind of document.
pub struct Form<V> {
    /// Returns the key; the file name is derived from its hash.
    pub key: fn(&V) -> &str,
    /// Encodes a document.
    pub encode: fn(&V) -> Vec<u8>,
    /// Decodes a document strictly.
    pub decode: fn(&[u8]) -> Result<DecodedDocument<V>, RecordError>,
}

/// A directory of documents.
pub struct RecordStore<V> {
    folder: PathBuf,
    form: Form<V>,
    cache: LruCache<String, V>,
    complete: bool,
    on_disk: usize,
    /// `None` if upstream has no such records.
    gauges: Option<RecordGauges>,
}

fn invalid(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl<V: Clone> RecordStore<V> {
    /// Opens the directory, reads its documents, and rewrites older versions.
    ///
    /// # Errors
    /// The directory cannot be created or listed. A file that cannot be decoded is ignored.
    pub fn open(
        folder: PathBuf,
        form: Form<V>,
        capacity: NonZeroUsize,
        gauges: Option<RecordGauges>,
    ) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        let cache = LruCache::new(capacity);
        let mut store = Self { folder, form, cache, complete: true, on_disk: 0, gauges };
        for path in store.files()? {
            match store.read(&path) {
                Ok(Some(document)) => {
                    if document.outdated {
                        replace(&path, &(store.form.encode)(&document.value), MODE)?;
                    }
                    store.remember(document.value);
                }
                Ok(None) => {}
                Err(error) => {
                    store.complete = false;
                    warn!(path = %path.display(), err = %error, "Failed to read image record");
                }
            }
        }
        store.recount();
        Ok(store)
    }

    /// Lists record files and removes leftovers of writes. The mutex excludes concurrent writes.
    fn files(&self) -> io::Result<Vec<PathBuf>> {
        let mut paths = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.starts_with('.') || name.ends_with(".tmp") {
                // an interrupted write, by this agent or upstream
                let _ = fs::remove_file(&path);
            } else if name.starts_with("sha256-") {
                paths.push(path);
            }
        }
        Ok(paths)
    }

    fn recount(&mut self) {
        self.on_disk = self.files().map_or(self.on_disk, |files| files.len());
        self.publish();
    }

    fn publish(&self) {
        let Some(gauges) = &self.gauges else { return };
        let percent = self.cache.len() * 100 / self.cache.cap().get();
        gauges.on_disk.set(i64::try_from(self.on_disk).unwrap_or(i64::MAX));
        gauges.usage_percent.set(i64::try_from(percent).unwrap_or(100));
    }

    fn path(&self, key: &str) -> PathBuf {
        self.folder.join(format!("sha256-{}", hex::encode(Sha256::digest(key))))
    }

    fn read(&self, path: &Path) -> io::Result<Option<DecodedDocument<V>>> {
        read(path)?.map(|data| (self.form.decode)(&data).map_err(invalid)).transpose()
    }

    fn remember(&mut self, value: V) {
        let key = (self.form.key)(&value).to_owned();
        if self.cache.len() >= self.cache.cap().get() && !self.cache.contains(&key) {
            self.complete = false;
        }
        self.cache.put(key, value);
    }

    /// Reads the document of that key.
    ///
    /// # Errors
    /// The file cannot be read or decoded.
    pub fn get(&mut self, key: &str) -> io::Result<Option<V>> {
        if let Some(known) = self.cache.get(key) {
            return Ok(Some(known.clone()));
        }
        if self.complete {
            return Ok(None);
        }
        let Some(document) = self.read(&self.path(key))? else { return Ok(None) };
        self.remember(document.value.clone());
        self.publish();
        Ok(Some(document.value))
    }

    /// Writes a document.
    ///
    /// # Errors
    /// The file cannot be written; its previous content is kept.
    pub fn put(&mut self, value: V) -> io::Result<()> {
        let path = self.path((self.form.key)(&value));
        let new = !path.exists();
        replace(&path, &(self.form.encode)(&value), MODE)?;
        self.remember(value);
        self.on_disk += usize::from(new);
        self.publish();
        Ok(())
    }

    /// Removes a document. Idempotent.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn delete(&mut self, key: &str) -> io::Result<()> {
        match fs::remove_file(self.path(key)) {
            Ok(()) => self.on_disk = self.on_disk.saturating_sub(1),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        self.cache.pop(key);
        self.publish();
        Ok(())
    }

    /// All readable documents.
    ///
    /// # Errors
    /// The directory cannot be listed.
    pub fn all(&self) -> io::Result<Vec<V>> {
        if self.complete {
            return Ok(self.cache.iter().map(|(_, value)| value.clone()).collect());
        }
        let files = self.files()?;
        Ok(files.iter().filter_map(|path| self.read(path).ok().flatten()).map(|document| document.value).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::record_documents::{decode_intent, encode_intent};
    use berth_metrics::{Images, Registry};

    fn open(folder: &Path, capacity: usize) -> RecordStore<String> {
        let form = Form { key: |v: &String| v.as_str(), encode: |v| encode_intent(v), decode: decode_intent };
        let gauges = Some(Images::new(&Registry::new()).intents);
        RecordStore::open(folder.to_path_buf(), form, NonZeroUsize::new(capacity).expect("not zero"), gauges)
            .expect("opens")
    }

    #[test]
    fn documents_survive_and_are_found_beyond_the_cache() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut store = open(dir.path(), 2);
        for image in ["a", "b", "c"] {
            store.put(image.to_owned()).expect("written");
        }
        assert!(!store.complete, "one was lost from the cache");
        let gauges = store.gauges.clone().expect("given");
        assert_eq!((gauges.on_disk.get(), gauges.usage_percent.get()), (3, 100));
        let mut again = open(dir.path(), 2);
        for image in ["a", "b", "c"] {
            assert_eq!(again.get(image).expect("readable"), Some(image.to_owned()));
        }
        assert_eq!(again.get("d").expect("readable"), None);
        again.delete("a").expect("removed");
        again.delete("a").expect("idempotent");
        assert_eq!(again.get("a").expect("readable"), None);
        assert_eq!(again.all().expect("listed").len(), 2);
    }

    #[test]
    fn junk_is_an_error_and_leftovers_go() {
        let dir = tempfile::tempdir().expect("a directory");
        let junk = dir.path().join(format!("sha256-{}", hex::encode(Sha256::digest("x"))));
        fs::write(&junk, "junk").expect("written");
        let leftover = dir.path().join("sha256-1.tmp");
        fs::write(&leftover, "half").expect("written");
        let mut store = open(dir.path(), 8);
        assert!(store.get("x").is_err());
        assert!(!leftover.exists());
    }

    #[test]
    fn modes_and_older_versions() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().expect("a directory");
        let folder = dir.path().join("pulling");
        let mut store = open(&folder, 8);
        store.put("x".to_owned()).expect("written");
        let path = store.path("x");
        let mode = |p: &Path| fs::metadata(p).expect("there").permissions().mode() & 0o777;
        assert_eq!((mode(&folder), mode(&path)), (0o700, 0o600));
        let new = fs::read_to_string(&path).expect("readable");
        fs::write(&path, new.replace("v1beta1", "v1alpha1")).expect("written");
        open(&folder, 8);
        assert_eq!(fs::read_to_string(&path).expect("readable"), new);
    }
}
