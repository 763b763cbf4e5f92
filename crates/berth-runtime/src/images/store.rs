//! Image store: records, layers, blobs, and container roots behind the CRI image service.
//!
//! Queries are served from memory; disk work runs on the blocking pool and completes even if the caller is cancelled.
//! Lock order: catalogue, then layers, then snapshots; none is held during disk writes, except the lock that serializes
//! record writes. Implements spec 09b §2-§8.

use std::{
    collections::BTreeSet,
    fs,
    io::Read,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicU64},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tokio::sync::Notify;
use tracing::{info, warn};

pub use self::{
    garbage_collection::{FsInfo, FsUsage},
    import::{ImportOptions, PullWithProgress},
};
use self::{
    garbage_collection::{StoreCounters, load_records},
    pull::PullGroup,
};
use super::{
    archive::ArchiveImage,
    builtin,
    catalogue::{Catalogue, references},
    content::ContentStore,
    digest::{Digest, chain_ids},
    error::{ImageError, IoContext},
    layers::{LayerMeta, Layers, Lease, UnpackHelpers},
    merged_layers::MergedLayers,
    model,
    names::Name,
    progress::{ImageProgress, ProgressReader, Stage},
    record::{ImageOrigin, ImageRecord, ImageReference},
    snapshots::{self, Snapshots, Snapshotter},
    unpacker::{LayerFormat, LayerLimits, UnpackPolicy},
};
use crate::{
    launch::image::LaunchImage,
    store::record::{self, Durability},
};
use berth_shim::plan::{MountKind, RootKind};
use berth_sys::failpoint;

/// Debounce interval between a removal and the collection of unused content.
const DEBOUNCE: Duration = Duration::from_secs(1);
/// Interval of measuring writable layers.
const RECOUNT: Duration = Duration::from_secs(600);
/// Minimum free space on the disk, bytes.
const KEEP_FREE: u64 = 1 << 30;

/// Configuration of the store (spec 09 §5).
#[derive(Clone, Debug)]
pub struct ImageStoreSettings {
    /// Root directory, `$ROOT`.
    pub root: PathBuf,
    /// How container roots are made.
    pub snapshotter: Snapshotter,
    /// Limits of a layer.
    pub bounds: LayerLimits,
    /// Names of images exempt from garbage collection.
    pub pinned: Vec<String>,
    /// Directories with `<host>/hosts.toml`, in search order.
    pub registries: Vec<PathBuf>,
    /// Timeout of a download without received data; zero: none.
    pub idle_timeout: Duration,
    /// Concurrent layer downloads of one image; twice as many for all images.
    pub downloads: usize,
    /// Whether compressed layers are kept after unpacking.
    pub keeps_compressed: bool,
    /// Helpers for unpacking.
    pub helpers: UnpackHelpers,
    /// Program that the built-in images are made from; none: no built-in images.
    pub program: Option<PathBuf>,
}

impl ImageStoreSettings {
    /// Default settings with this root directory, without built-in images.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            snapshotter: Snapshotter::Auto,
            bounds: LayerLimits::default(),
            pinned: Vec::new(),
            registries: Vec::new(),
            idle_timeout: Duration::from_secs(300),
            downloads: 3,
            keeps_compressed: false,
            helpers: UnpackHelpers::default(),
            program: None,
        }
    }
}

struct ImageStoreInner {
    settings: ImageStoreSettings,
    content: ContentStore,
    layers: Arc<Layers>,
    snapshots: Snapshots,
    catalogue: Mutex<Catalogue>,
    /// Serializes record writes, so that they reach the disk in the order of catalogue changes.
    writing: Mutex<()>,
    pinned: BTreeSet<String>,
    garbage: Notify,
    writable: (AtomicU64, AtomicU64),
    tally: StoreCounters,
    pulls: PullGroup,
    /// Serializes imports of an archive directory.
    importing: Mutex<()>,
}

/// Handle of the image store. Clones share the same store.
#[derive(Clone)]
pub struct ImageStore {
    inner: Arc<ImageStoreInner>,
}

impl ImageStore {
    /// Opens the store below `$ROOT`, removes left-overs of a crash, and creates the built-in images.
    ///
    /// # Errors
    /// A directory cannot be created or read, or the requested snapshotter is not supported.
    pub async fn open(settings: ImageStoreSettings) -> Result<Self, ImageError> {
        blocking(move || Self::open_now(settings)).await
    }

    fn open_now(settings: ImageStoreSettings) -> Result<Self, ImageError> {
        let root = &settings.root;
        fs::DirBuilder::new().recursive(true).mode(0o700).create(root).attempt(format!("create {}", root.display()))?;
        let form = snapshots::probe(root, settings.snapshotter)?;
        let disk = rustix::fs::statvfs(root).attempt("stat filesystem")?;
        let keep_free = KEEP_FREE.max(disk.f_blocks.saturating_mul(disk.f_frsize) / 50);
        let content = ContentStore::open(root)?;
        content.clean(SystemTime::now())?;
        let layers =
            Layers::open(root, UnpackPolicy { bounds: settings.bounds, form, keep_free }, settings.helpers.clone())?;
        let snapshots = Snapshots::open(root, form)?;
        let catalogue = load_records(&root.join("images"), &layers)?;
        let pinned = settings.pinned.iter().filter_map(|name| Name::parse(name).ok()).map(|name| name.to_string());
        let inner = ImageStoreInner {
            pinned: pinned.collect(),
            content,
            layers,
            snapshots,
            catalogue: Mutex::new(catalogue),
            writing: Mutex::new(()),
            garbage: Notify::new(),
            writable: (AtomicU64::new(0), AtomicU64::new(0)),
            tally: StoreCounters::default(),
            pulls: PullGroup::new(settings.downloads),
            importing: Mutex::default(),
            settings,
        };
        let out = Self { inner: Arc::new(inner) };
        if let Some(program) = &out.inner.settings.program {
            let made = out.inner.make_builtin(program);
            if let Err(error) = made {
                warn!(error = %error, "Failed to create built-in images");
            }
        }
        out.inner.collect();
        out.inner.measure();
        Ok(out)
    }

    /// Images, newest first; a filter selects the image it refers to, or all of a repository given without tag.
    ///
    /// # Errors
    /// The filter is an ambiguous ID prefix.
    pub fn list(&self, filter: &str) -> Result<Vec<Arc<ImageRecord>>, ImageError> {
        if filter.is_empty() {
            return Ok(self.inner.catalogue().list());
        }
        let of_repository = self.inner.catalogue().of_repository(filter);
        if of_repository.is_empty() { Ok(self.status(filter)?.into_iter().collect()) } else { Ok(of_repository) }
    }

    /// The image with this ID, ID prefix, or name; `None` if there is none.
    ///
    /// # Errors
    /// The ID prefix is ambiguous.
    pub fn status(&self, reference: &str) -> Result<Option<Arc<ImageRecord>>, ImageError> {
        self.inner.catalogue().find(reference)
    }

    /// The image, and what the launch plans of its containers use.
    ///
    /// # Errors
    /// `failed to resolve image "x": not found`, or an ambiguous ID prefix.
    pub fn image(&self, reference: &str) -> Result<(Arc<ImageRecord>, LaunchImage), ImageError> {
        let missing = || ImageError::not_found(format!("failed to resolve image {reference:?}: not found"));
        let record = self.status(reference)?.ok_or_else(missing)?;
        let image = record.launch_image();
        Ok((record, image))
    }

    /// An image's original configuration; `None` if its blob is missing.
    ///
    /// # Errors
    /// The blob cannot be read, or does not match its digest.
    pub async fn spec(&self, image: &ImageRecord) -> Result<Option<serde_json::Value>, ImageError> {
        let (inner, id) = (Arc::clone(&self.inner), image.id);
        blocking(move || {
            let bytes = inner.content.read(&id, model::LONGEST_CONFIG)?;
            bytes.map(|bytes| model::json(&bytes, "image config")).transpose()
        })
        .await
    }

    /// Record of a layer.
    pub fn layer(&self, number: u64) -> Option<LayerMeta> {
        self.inner.layers.meta(number)
    }

    /// Removes the image with all its names, from memory before this returns; succeeds if there is none.
    ///
    /// # Errors
    /// The ID prefix is ambiguous, or the record cannot be deleted.
    pub async fn remove(&self, reference: &str) -> Result<(), ImageError> {
        let (inner, reference) = (Arc::clone(&self.inner), reference.to_owned());
        blocking(move || inner.remove(&reference)).await
    }

    /// Disk usage for `ImageFsInfo`.
    pub fn fs_info(&self) -> FsInfo {
        self.inner.fs_info()
    }

    /// Bytes and inodes of a container's writable layer, counted by a walk of the directory.
    ///
    /// # Errors
    /// The walk fails.
    pub async fn writable_usage(&self, container: &str) -> Result<(u64, u64), ImageError> {
        let folder = self.inner.snapshots.folder().join(container).join("u");
        blocking(move || super::usage::count(&folder).attempt("measure writable layer")).await
    }

    /// Creates a container's root from an image.
    ///
    /// # Errors
    /// There is no such image, the container already has a root, or it cannot be created.
    pub async fn prepare_root(&self, container: &str, image: &str) -> Result<RootKind, ImageError> {
        let (inner, container, image) = (Arc::clone(&self.inner), container.to_owned(), image.to_owned());
        blocking(move || {
            let lease = inner.lease_of(&image)?;
            inner.snapshots.prepare(&container, lease.numbers(), &inner.layers)
        })
        .await
    }

    /// How a container's root is mounted; `None` if it has none.
    pub fn root_for(&self, container: &str) -> Option<RootKind> {
        self.inner.snapshots.root_for(container, &self.inner.layers)
    }

    /// The image, and the mount source that shows its files read-only in a container; both are kept until the root is
    /// released.
    ///
    /// # Errors
    /// There is no such image, sub path, or root.
    pub async fn mount_image(
        &self,
        container: &str,
        image: &str,
        sub_path: &str,
    ) -> Result<(Arc<ImageRecord>, MountKind), ImageError> {
        let inner = Arc::clone(&self.inner);
        let (container, image, sub_path) = (container.to_owned(), image.to_owned(), sub_path.to_owned());
        blocking(move || {
            let missing = || ImageError::not_found(format!("failed to resolve image {image:?}: not found"));
            let record = inner.catalogue().find(&image)?.ok_or_else(missing)?;
            let lease = inner.lease_of(&image)?;
            let sub_path = sub_path.trim_matches('/');
            let leaves = sub_path.split('/').any(|part| part == "..");
            if leaves || !inner.merged(lease.numbers())?.is_folder(sub_path.as_bytes()) {
                return Err(ImageError::invalid(format!(
                    "image sub path {sub_path:?} is not a directory of image {image:?}"
                )));
            }
            let source = inner.snapshots.mount_image(&container, lease.numbers(), sub_path, &inner.layers)?;
            Ok((record, source))
        })
        .await
    }

    /// Deletes a container's root; succeeds if there is none. Schedules the collection of unused layers.
    ///
    /// # Errors
    /// The blocking pool has shut down.
    pub async fn release_root(&self, container: &str) -> Result<(), ImageError> {
        let (inner, container) = (Arc::clone(&self.inner), container.to_owned());
        blocking(move || {
            inner.snapshots.release(&container);
            inner.garbage.notify_one();
            Ok(())
        })
        .await
    }

    /// IDs of containers that have a root; the caller releases those of unknown containers.
    pub fn roots(&self) -> Vec<String> {
        self.inner.snapshots.containers()
    }

    /// Collects unused layers and blobs after removals, and measures writable layers when idle; never returns.
    pub async fn collector(&self) {
        loop {
            // A notification restarts the interval; its end costs one measurement.
            let woken = tokio::time::timeout(RECOUNT, self.inner.garbage.notified()).await;
            let inner = Arc::clone(&self.inner);
            let work = match woken {
                Ok(()) => {
                    tokio::time::sleep(DEBOUNCE).await;
                    blocking(move || Ok(inner.collect())).await.map(drop)
                }
                Err(_) => {
                    let measured = move || {
                        inner.measure();
                        Ok(())
                    };
                    blocking(measured).await
                }
            };
            if let Err(error) = work {
                warn!(error = %error, "Image garbage collection failed");
            }
        }
    }

    /// Collects unused layers and blobs now; returns the number of deleted layers.
    ///
    /// # Errors
    /// The blocking pool has shut down.
    pub async fn collect(&self) -> Result<usize, ImageError> {
        let inner = Arc::clone(&self.inner);
        blocking(move || Ok(inner.collect())).await
    }
}

impl ImageStoreInner {
    fn catalogue(&self) -> MutexGuard<'_, Catalogue> {
        self.catalogue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record_path(&self, id: &Digest) -> PathBuf {
        self.settings.root.join("images").join(format!("{}.json", id.hex()))
    }

    /// Leases an image's layers: they are not collected until the lease is dropped.
    fn lease_of(&self, image: &str) -> Result<Lease, ImageError> {
        let missing = || ImageError::not_found(format!("failed to resolve image {image:?}: not found"));
        // Under the catalogue's lock, so that a removal happens before or after.
        let catalogue = self.catalogue();
        let record = catalogue.find(image)?.ok_or_else(missing)?;
        self.layers.lease_all(&record.layers).ok_or_else(missing)
    }

    /// Merged view of these layers, given bottom first.
    fn merged(&self, numbers: &[u64]) -> Result<MergedLayers, ImageError> {
        MergedLayers::open(&self.stacked_directories(numbers)).attempt("open layers")
    }

    /// Directories of layers to stack, topmost first.
    fn stacked_directories(&self, numbers: &[u64]) -> Vec<PathBuf> {
        let shown = match self.layers.policy().form {
            LayerFormat::Merged => numbers.split_at(numbers.len().saturating_sub(1)).1,
            LayerFormat::Overlay { .. } => numbers,
        };
        shown.iter().rev().map(|number| self.layers.path(*number)).collect()
    }

    fn remove(&self, reference: &str) -> Result<(), ImageError> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let removed = {
            let mut catalogue = self.catalogue();
            let found = catalogue.find(reference)?;
            found.and_then(|record| catalogue.remove(&record.id))
        };
        let Some(record) = removed else { return Ok(()) };
        match fs::remove_file(self.record_path(&record.id)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(ImageError::io("remove image record", &error));
            }
            _ => {}
        }
        failpoint::reached("image.removed");
        info!(image = %record.id, "Removed image");
        self.garbage.notify_one();
        Ok(())
    }

    fn make_builtin(&self, program: &Path) -> Result<(), ImageError> {
        let layer = builtin::Layer::of(program, &self.settings.root)?;
        for image in layer.images()? {
            let names: Vec<String> = image.names.iter().map(Name::to_string).collect();
            let here = self.catalogue().get(&image.parsed.config.digest);
            let is_whole = |record: &Arc<ImageRecord>| names.iter().all(|name| record.repo_tags().contains(name));
            if here.is_none_or(|record| !is_whole(&record)) {
                self.commit(&image, ImageOrigin::Builtin, &ImageProgress::default(), |_| layer.stream())?;
            }
            // Images of an older program version have lost their names.
            let stale =
                |record: &Arc<ImageRecord>| record.source == ImageOrigin::Builtin && record.repo_tags().is_empty();
            let stale: Vec<_> = self.catalogue().list().into_iter().filter(stale).collect();
            stale.iter().try_for_each(|record| self.remove(&record.id.to_string()))?;
        }
        Ok(())
    }

    /// Stores layers, then content, then the record, so that a listed image is complete.
    fn commit<R: Read>(
        &self,
        image: &ArchiveImage,
        source: ImageOrigin,
        progress: &ImageProgress,
        mut open: impl FnMut(usize) -> Result<R, ImageError>,
    ) -> Result<Arc<ImageRecord>, ImageError> {
        let parsed = &image.parsed;
        let config = model::config(&image.config, parsed.layers.len())?;
        let chains = chain_ids(&config.diff_ids);
        let mut lease = self.layers.lease();
        for (at, (chain, diff_id)) in chains.iter().zip(&config.diff_ids).enumerate() {
            let digest = parsed.layers.get(at).map_or(*diff_id, |layer| layer.digest);
            let watched = || Ok(ProgressReader::new(open(at)?, digest, progress));
            let extended = self.layers.extend(&mut lease, *chain, *diff_id, watched);
            extended.map_err(|error| error.within(format!("layer {digest}")))?;
            progress.enter(digest, Stage::Done, 0);
        }
        let merged = self.merged(lease.numbers())?;
        let now = now_ns();
        let refs: Vec<ImageReference> =
            image.names.iter().flat_map(|name| references(name, image.target.digest, now)).collect();
        let packed = parsed.layers.iter().fold(0u64, |sum, layer| sum.saturating_add(layer.size));
        let record = ImageRecord {
            v: record::VERSION,
            id: parsed.config.digest,
            pinned: source == ImageOrigin::Builtin
                || refs.iter().any(|reference| self.pinned.contains(&reference.name)),
            refs,
            target: image.target.clone(),
            manifest: image.manifest.clone(),
            platform: config.platform,
            layers: lease.numbers().to_vec(),
            chain_id: chains.last().copied(),
            size: packed.saturating_add(image.manifest.size).saturating_add(parsed.config.size),
            config: config.run,
            passwd: merged.small_file("etc/passwd"),
            group: merged.small_file("etc/group"),
            source,
            created: now,
            last_used: now,
        };
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        for bytes in [&image.config, &image.manifest_bytes, &image.target_bytes] {
            self.content.put(bytes)?;
        }
        failpoint::reached("image.content");
        let id = record.id;
        // Change a copy first: a record that cannot be written must not appear in memory.
        let mut changed = self.catalogue().clone();
        for written in changed.add(record) {
            record::write(&self.record_path(&written.id), &*written, Durability::Synced)
                .attempt("write image record")?;
        }
        failpoint::reached("image.written");
        *self.catalogue() = changed;
        info!(image = %id, source = ?source, "Image is ready");
        self.catalogue().get(&id).ok_or_else(|| ImageError::not_found("image disappeared"))
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ImageError> + Send + 'static,
) -> Result<T, ImageError> {
    let joined = tokio::task::spawn_blocking(work).await;
    joined.unwrap_or_else(|error| Err(ImageError::bad_content(format!("image task failed: {error}"))))
}

fn now_ns() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

pub mod export;
mod garbage_collection;
mod import;
mod import_directory;
mod pull;
pub mod verification;

#[cfg(test)]
mod tests;
