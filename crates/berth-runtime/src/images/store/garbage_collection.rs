//! Garbage collection, disk usage, and record loading of the image store. Blocking.
//!
//! Implements spec 09b §3 (ImageFsInfo), §6; 09 §7.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::{
        PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use tracing::warn;

use super::{ImageStore, ImageStoreInner};
use crate::{
    images::{
        catalogue::Catalogue,
        digest::Digest,
        error::{ImageError, IoContext},
        layers::{self, Layers},
        model::{self, Descriptor, LONGEST_MANIFEST, ManifestOrIndex},
        record::ImageRecord,
        tree_copy::Budget,
        unpacker::LayerFormat,
        usage, volume,
    },
    store::record,
};

/// Disk usage of the runtime on one file system.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FsUsage {
    /// Directory on the file system.
    pub mountpoint: PathBuf,
    /// Bytes of the counted layers, blobs, and writable layers.
    pub used_bytes: u64,
    /// Inodes of the counted layers, blobs, and writable layers.
    pub inodes_used: u64,
}

/// Disk usage for `ImageFsInfo`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FsInfo {
    /// Layers and blobs; includes writable layers if they are on the same device.
    pub images: FsUsage,
    /// Writable layers, if they are on another device.
    pub containers: Option<FsUsage>,
}

/// Counters since startup.
#[derive(Debug, Default)]
pub(super) struct StoreCounters {
    /// Compressed bytes of pulled layers.
    pub(super) pulled_bytes: AtomicU64,
    removed_layers: AtomicU64,
    removed_blobs: AtomicU64,
}

impl ImageStore {
    /// Name of the snapshotter in use: `overlay` or `copy`.
    pub fn snapshotter(&self) -> &'static str {
        match self.inner.layers.form() {
            LayerFormat::Overlay { .. } => "overlay",
            LayerFormat::Merged => "copy",
        }
    }

    /// Counters since startup: compressed bytes of pulled layers, deleted layers, deleted blobs.
    pub fn tally(&self) -> (u64, u64, u64) {
        let tally = &self.inner.tally;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (read(&tally.pulled_bytes), read(&tally.removed_layers), read(&tally.removed_blobs))
    }

    /// Number of layers and their total size, bytes.
    pub fn layers(&self) -> (usize, u64) {
        (self.inner.layers.count(), self.inner.layers.usage().0)
    }

    /// Copies an image's content at a path into an existing directory; returns whether the image has a directory there.
    /// Blocking, at most until the deadline; preserves the minimum free space.
    ///
    /// # Errors
    /// There is no such image, or an I/O error; `ENOSPC` or `ETIMEDOUT` if the copy exceeds its budget.
    pub fn fill_volume(&self, image: &str, path: &str, to: &Path, deadline: Instant) -> Result<bool, ImageError> {
        let lease = self.inner.lease_of(image)?;
        let userxattr = matches!(self.inner.layers.policy().form, LayerFormat::Overlay { userxattr: true });
        let disk = rustix::fs::statvfs(to).attempt("stat filesystem")?;
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        let bytes = free.saturating_sub(self.inner.layers.policy().keep_free);
        let budget = Budget { bytes, deadline: Some(deadline) };
        volume::fill(&self.inner.stacked_directories(lease.numbers()), userxattr, path, to, budget)
    }
}

impl ImageStoreInner {
    pub(super) fn collect(&self) -> usize {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        // Read leases before owners: a layer released after this has an owner by the time owners are read.
        let leased = self.layers.leased();
        let records = self.catalogue().list();
        let mut owned: BTreeSet<u64> = records.iter().flat_map(|record| record.layers.iter().copied()).collect();
        owned.extend(self.snapshots.owned());
        owned.extend(leased);
        let removed = self.layers.sweep(&owned);
        self.tally.removed_layers.fetch_add(u64::try_from(removed).unwrap_or_default(), Ordering::Relaxed);
        let digests = records.iter().flat_map(|record| {
            let refs = record.refs.iter().map(|reference| reference.target);
            refs.chain([record.id, record.manifest.digest, record.target.digest])
        });
        let mut kept: BTreeSet<Digest> = digests.collect();
        kept.extend(records.iter().flat_map(|record| self.packed(record)).map(|layer| layer.digest));
        kept.extend(self.pulls.blobs_in_use());
        match self.content.list() {
            Ok(blobs) => {
                for (digest, _) in blobs.iter().filter(|(digest, _)| !kept.contains(digest)) {
                    match self.content.remove(digest) {
                        Ok(()) => drop(self.tally.removed_blobs.fetch_add(1, Ordering::Relaxed)),
                        Err(error) => warn!(error = %error, "Failed to delete blob"),
                    }
                }
            }
            Err(error) => warn!(error = %error, "Failed to list blobs"),
        }
        removed
    }

    /// Compressed layers named by an image's manifest, if the store keeps them. Some may be absent.
    pub(super) fn packed(&self, record: &ImageRecord) -> Vec<Descriptor> {
        if !self.settings.keeps_compressed {
            return Vec::new();
        }
        let bytes = self.content.read(&record.manifest.digest, LONGEST_MANIFEST).ok().flatten();
        match bytes.map(|bytes| model::parse_manifest_or_index(&bytes, &record.manifest.media_type)) {
            Some(Ok(ManifestOrIndex::Manifest(manifest))) => manifest.layers,
            // `verify` reports broken manifests.
            _ => Vec::new(),
        }
    }

    pub(super) fn measure(&self) {
        let counted = match usage::count(self.snapshots.folder()) {
            Ok(counted) => counted,
            // Keep the last value: a container that hides its files must not appear small.
            Err(error) => return warn!(error = %error, "Failed to list writable layers"),
        };
        self.writable.0.store(counted.0, Ordering::Relaxed);
        self.writable.1.store(counted.1, Ordering::Relaxed);
    }

    pub(super) fn fs_info(&self) -> FsInfo {
        let (mut bytes, mut inodes) = self.layers.usage();
        for (_, length) in self.content.list().unwrap_or_default() {
            bytes = bytes.saturating_add(length);
            inodes = inodes.saturating_add(1);
        }
        let share = |mountpoint: &Path, used_bytes, inodes_used| FsUsage {
            mountpoint: mountpoint.to_owned(),
            used_bytes,
            inodes_used,
        };
        let writable = (self.writable.0.load(Ordering::Relaxed), self.writable.1.load(Ordering::Relaxed));
        let device = |path: &Path| rustix::fs::stat(path).map(|stat| stat.st_dev).ok();
        let (root, snap) = (&self.settings.root, self.snapshots.folder());
        if device(root) == device(snap) {
            let images = share(root, bytes.saturating_add(writable.0), inodes.saturating_add(writable.1));
            return FsInfo { images, containers: None };
        }
        let containers = Some(share(snap, writable.0, writable.1));
        FsInfo { images: share(root, bytes, inodes), containers }
    }
}

/// Loads the records; deletes those that are invalid or have missing layers.
pub(super) fn load_records(folder: &Path, layers: &Layers) -> Result<Catalogue, ImageError> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).attempt("create images")?;
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).attempt("list images")? {
        let path = entry.attempt("list images")?.path();
        match record::read::<ImageRecord>(&path) {
            Ok(Some(record)) if layers.has_all(&record.layers) => found.push(record),
            other => {
                let error = other.err().map(|error| error.to_string()).unwrap_or_else(|| "layer not found".into());
                warn!(path = %path.display(), error, "Removing corrupt image record");
                layers::delete(folder, &path.file_name().unwrap_or_default().to_string_lossy());
            }
        }
    }
    Ok(Catalogue::new(found))
}
