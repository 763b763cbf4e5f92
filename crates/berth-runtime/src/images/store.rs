//! The image store: what the runtime's image service asks, and what containers are made of.
//!
//! One value owns records, layers, content and snapshots. Questions are answered from memory; work that touches the disk runs on
//! the blocking pool, and goes on when its caller leaves. Order of locks: catalogue, then layers, then snapshots; none is held
//! while the disk is written, except that records are written one after the other. Behaviour: spec 09b §2-§8.

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
    bring::{Choice, WatchedPull},
    keep::{FsInfo, FsUsage},
};
use self::{
    keep::{Tally, load_records},
    pull::Pulls,
};
use super::{
    apply::{Bounds, Form, Policy},
    archive::Found,
    builtin,
    catalogue::{Catalogue, references},
    content::Content,
    digest::{Digest, chain_ids},
    error::{Attempt, ImageError},
    layers::{Helpers, LayerMeta, Layers, Lease},
    merged::Merged,
    model,
    names::Name,
    progress::{Progress, Stage, Watched},
    record::{Origin, Record, Reference},
    snapshots::{self, Snapshots, Snapshotter},
};
use crate::{
    launch::image::ImageConfig,
    store::record::{self, Durability},
};
use berth_shim::plan::{RootKind, Source};
use berth_sys::step;

/// How long removals are gathered before what nobody uses is deleted.
const DEBOUNCE: Duration = Duration::from_secs(1);
/// How often writable layers are measured.
const RECOUNT: Duration = Duration::from_secs(600);
/// Bytes that must stay free, at least.
const KEEP_FREE: u64 = 1 << 30;

/// How the store works (spec 09 §5).
#[derive(Clone, Debug)]
pub struct Settings {
    /// `$ROOT`.
    pub root: PathBuf,
    /// How roots are made.
    pub snapshotter: Snapshotter,
    /// Largest layers.
    pub bounds: Bounds,
    /// Names of images that are never collected.
    pub pinned: Vec<String>,
    /// Directories with `<host>/hosts.toml`, in the order in which they are looked at.
    pub registries: Vec<PathBuf>,
    /// How long a download may give nothing; zero: for ever.
    pub patience: Duration,
    /// Layers of one image that are downloaded at a time; of all images twice as many.
    pub downloads: usize,
    /// Whether packed layers are kept once they are unpacked.
    pub keeps_packed: bool,
    /// Who helps with unpacking.
    pub helpers: Helpers,
    /// The program the built-in images are made of; none: there are none.
    pub program: Option<PathBuf>,
}

impl Settings {
    /// Defaults below a directory, without built-in images.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            snapshotter: Snapshotter::Auto,
            bounds: Bounds::default(),
            pinned: Vec::new(),
            registries: Vec::new(),
            patience: Duration::from_secs(300),
            downloads: 3,
            keeps_packed: false,
            helpers: Helpers::default(),
            program: None,
        }
    }
}

struct Inner {
    settings: Settings,
    content: Content,
    layers: Arc<Layers>,
    snapshots: Snapshots,
    catalogue: Mutex<Catalogue>,
    /// Held while records are written, so that they reach the disk in the order of the catalogue.
    writing: Mutex<()>,
    pinned: BTreeSet<String>,
    garbage: Notify,
    writable: (AtomicU64, AtomicU64),
    tally: Tally,
    pulls: Pulls,
    /// Held while a directory of archives is gone through.
    importing: Mutex<()>,
}

/// The store. Clones are the same store.
#[derive(Clone)]
pub struct ImageStore {
    inner: Arc<Inner>,
}

impl ImageStore {
    /// Opens the store below `$ROOT` and repairs what a crash left; makes the built-in images.
    ///
    /// # Errors
    /// Where a directory cannot be made or read, or the wanted snapshotter does not work here.
    pub async fn open(settings: Settings) -> Result<Self, ImageError> {
        blocking(move || Self::open_now(settings)).await
    }

    fn open_now(settings: Settings) -> Result<Self, ImageError> {
        let root = &settings.root;
        fs::DirBuilder::new().recursive(true).mode(0o700).create(root).attempt(format!("create {}", root.display()))?;
        let form = snapshots::probe(root, settings.snapshotter)?;
        let disk = rustix::fs::statvfs(root).attempt("look at the disk")?;
        let keep_free = KEEP_FREE.max(disk.f_blocks.saturating_mul(disk.f_frsize) / 50);
        let content = Content::open(root)?;
        content.clean(SystemTime::now())?;
        let layers = Layers::open(root, Policy { bounds: settings.bounds, form, keep_free }, settings.helpers.clone())?;
        let snapshots = Snapshots::open(root, form)?;
        let catalogue = load_records(&root.join("images"), &layers)?;
        let pinned = settings.pinned.iter().filter_map(|name| Name::parse(name).ok()).map(|name| name.to_string());
        let inner = Inner {
            pinned: pinned.collect(),
            content,
            layers,
            snapshots,
            catalogue: Mutex::new(catalogue),
            writing: Mutex::new(()),
            garbage: Notify::new(),
            writable: (AtomicU64::new(0), AtomicU64::new(0)),
            tally: Tally::default(),
            pulls: Pulls::new(settings.downloads),
            importing: Mutex::default(),
            settings,
        };
        let out = Self { inner: Arc::new(inner) };
        if let Some(program) = &out.inner.settings.program {
            let made = out.inner.make_builtin(program);
            if let Err(error) = made {
                warn!(error = %error, "Built-in images cannot be made");
            }
        }
        out.inner.collect();
        out.inner.measure();
        Ok(out)
    }

    /// All images, the newest first; with a filter the one that it means, or all of a repository that it names without a tag.
    ///
    /// # Errors
    /// Where the filter is the beginning of several ids.
    pub fn list(&self, filter: &str) -> Result<Vec<Arc<Record>>, ImageError> {
        if filter.is_empty() {
            return Ok(self.inner.catalogue().list());
        }
        let of_repository = self.inner.catalogue().of_repository(filter);
        if of_repository.is_empty() { Ok(self.status(filter)?.into_iter().collect()) } else { Ok(of_repository) }
    }

    /// The image that an id, the beginning of one, or a name means; `None`: there is none.
    ///
    /// # Errors
    /// Where it is the beginning of several ids.
    pub fn status(&self, reference: &str) -> Result<Option<Arc<Record>>, ImageError> {
        self.inner.catalogue().find(reference)
    }

    /// The image, and what containers of it inherit.
    ///
    /// # Errors
    /// `failed to resolve image "x": not found`, or an ambiguous id.
    pub fn image(&self, reference: &str) -> Result<(Arc<Record>, ImageConfig), ImageError> {
        let missing = || ImageError::not_found(format!("failed to resolve image {reference:?}: not found"));
        let record = self.status(reference)?.ok_or_else(missing)?;
        let config = record.image_config();
        Ok((record, config))
    }

    /// An image's configuration as it came; none where it is no longer here.
    ///
    /// # Errors
    /// Where it cannot be read, or is not what its digest says.
    pub async fn spec(&self, image: &Record) -> Result<Option<serde_json::Value>, ImageError> {
        let (inner, id) = (Arc::clone(&self.inner), image.id);
        blocking(move || {
            let bytes = inner.content.read(&id, model::LONGEST_CONFIG)?;
            bytes.map(|bytes| model::json(&bytes, "image config")).transpose()
        })
        .await
    }

    /// What is remembered of a layer.
    pub fn layer(&self, number: u64) -> Option<LayerMeta> {
        self.inner.layers.meta(number)
    }

    /// Removes the image with all its names; gone from every answer when this returns. Unknown is good.
    ///
    /// # Errors
    /// Where the id is ambiguous, or the record cannot be deleted.
    pub async fn remove(&self, reference: &str) -> Result<(), ImageError> {
        let (inner, reference) = (Arc::clone(&self.inner), reference.to_owned());
        blocking(move || inner.remove(&reference)).await
    }

    /// What the image service says of disks.
    pub fn fs_info(&self) -> FsInfo {
        self.inner.fs_info()
    }

    /// Bytes and inodes of one container's writable layer, counted now.
    ///
    /// # Errors
    /// What the kernel says.
    pub async fn writable_usage(&self, container: &str) -> Result<(u64, u64), ImageError> {
        let folder = self.inner.snapshots.folder().join(container).join("u");
        blocking(move || super::usage::count(&folder).attempt("measure writable layer")).await
    }

    /// Makes a container's root of an image.
    ///
    /// # Errors
    /// Where there is no such image, the container has a root, or it cannot be made.
    pub async fn prepare_root(&self, container: &str, image: &str) -> Result<RootKind, ImageError> {
        let (inner, container, image) = (Arc::clone(&self.inner), container.to_owned(), image.to_owned());
        blocking(move || {
            let lease = inner.lease_of(&image)?;
            inner.snapshots.prepare(&container, lease.numbers(), &inner.layers)
        })
        .await
    }

    /// How a container's root is made; `None`: it has none.
    pub fn root_for(&self, container: &str) -> Option<RootKind> {
        self.inner.snapshots.root_for(container, &self.inner.layers)
    }

    /// What shows an image's files in a container, read-only, and that image; they stay until its root is released.
    ///
    /// # Errors
    /// Where there is no such image or root.
    pub async fn mount_image(
        &self,
        container: &str,
        image: &str,
        sub_path: &str,
    ) -> Result<(Arc<Record>, Source), ImageError> {
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
                    "image sub path {sub_path:?} is no directory of image {image:?}"
                )));
            }
            let source = inner.snapshots.mount_image(&container, lease.numbers(), sub_path, &inner.layers)?;
            Ok((record, source))
        })
        .await
    }

    /// Deletes a container's root; none there is good. Layers nobody else uses follow.
    ///
    /// # Errors
    /// Only where the blocking pool ends.
    pub async fn release_root(&self, container: &str) -> Result<(), ImageError> {
        let (inner, container) = (Arc::clone(&self.inner), container.to_owned());
        blocking(move || {
            inner.snapshots.release(&container);
            inner.garbage.notify_one();
            Ok(())
        })
        .await
    }

    /// Containers that have a root: whoever knows the containers releases those of others.
    pub fn roots(&self) -> Vec<String> {
        self.inner.snapshots.containers()
    }

    /// Deletes what nobody uses as it accumulates, and measures writable layers now and then; never returns.
    pub async fn collector(&self) {
        loop {
            // Both arms: an early wake-up costs one measurement.
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
                warn!(error = %error, "Collection of images failed");
            }
        }
    }

    /// Deletes layers and blobs nobody uses, now; how many layers.
    ///
    /// # Errors
    /// Only where the blocking pool ends.
    pub async fn collect(&self) -> Result<usize, ImageError> {
        let inner = Arc::clone(&self.inner);
        blocking(move || Ok(inner.collect())).await
    }
}

impl Inner {
    fn catalogue(&self) -> MutexGuard<'_, Catalogue> {
        self.catalogue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record_path(&self, id: &Digest) -> PathBuf {
        self.settings.root.join("images").join(format!("{}.json", id.hex()))
    }

    /// Holds an image's layers: from here on they stay until the lease is gone.
    fn lease_of(&self, image: &str) -> Result<Lease, ImageError> {
        let missing = || ImageError::not_found(format!("failed to resolve image {image:?}: not found"));
        // Under the catalogue's lock: a removal comes before or after, never between.
        let catalogue = self.catalogue();
        let record = catalogue.find(image)?.ok_or_else(missing)?;
        self.layers.lease_all(&record.layers).ok_or_else(missing)
    }

    /// These layers, from the bottom, as one root.
    fn merged(&self, numbers: &[u64]) -> Result<Merged, ImageError> {
        Merged::open(&self.shown(numbers)).attempt("open layers")
    }

    /// Directories of layers that are to be laid over each other, the topmost first.
    fn shown(&self, numbers: &[u64]) -> Vec<PathBuf> {
        let shown = match self.layers.policy().form {
            Form::Merged => numbers.split_at(numbers.len().saturating_sub(1)).1,
            Form::Overlay { .. } => numbers,
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
        step::reached("image.removed");
        info!(image = %record.id, "Image removed");
        self.garbage.notify_one();
        Ok(())
    }

    fn make_builtin(&self, program: &Path) -> Result<(), ImageError> {
        let layer = builtin::Layer::of(program, &self.settings.root)?;
        for image in layer.images()? {
            let names: Vec<String> = image.names.iter().map(Name::to_string).collect();
            let here = self.catalogue().get(&image.parsed.config.digest);
            let is_whole = |record: &Arc<Record>| names.iter().all(|name| record.repo_tags().contains(name));
            if here.is_none_or(|record| !is_whole(&record)) {
                self.commit(&image, Origin::Builtin, &Progress::default(), |_| layer.stream())?;
            }
            // What an older program made has no name any more.
            let stale = |record: &Arc<Record>| record.source == Origin::Builtin && record.repo_tags().is_empty();
            let stale: Vec<_> = self.catalogue().list().into_iter().filter(stale).collect();
            stale.iter().try_for_each(|record| self.remove(&record.id.to_string()))?;
        }
        Ok(())
    }

    /// Layers, then content, then the record: an image that is listed is whole.
    fn commit<R: Read>(
        &self,
        image: &Found,
        source: Origin,
        progress: &Progress,
        mut open: impl FnMut(usize) -> Result<R, ImageError>,
    ) -> Result<Arc<Record>, ImageError> {
        let parsed = &image.parsed;
        let config = model::config(&image.config, parsed.layers.len())?;
        let chains = chain_ids(&config.diff_ids);
        let mut lease = self.layers.lease();
        for (at, (chain, diff_id)) in chains.iter().zip(&config.diff_ids).enumerate() {
            let digest = parsed.layers.get(at).map_or(*diff_id, |layer| layer.digest);
            let watched = || Ok(Watched::new(open(at)?, digest, progress));
            let extended = self.layers.extend(&mut lease, *chain, *diff_id, watched);
            extended.map_err(|error| error.within(format!("layer {digest}")))?;
            progress.enter(digest, Stage::Done, 0);
        }
        let merged = self.merged(lease.numbers())?;
        let now = now_ns();
        let refs: Vec<Reference> =
            image.names.iter().flat_map(|name| references(name, image.target.digest, now)).collect();
        let packed = parsed.layers.iter().fold(0u64, |sum, layer| sum.saturating_add(layer.size));
        let record = Record {
            v: record::VERSION,
            id: parsed.config.digest,
            pinned: source == Origin::Builtin || refs.iter().any(|reference| self.pinned.contains(&reference.name)),
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
        step::reached("image.content");
        let id = record.id;
        // Tried on a copy: what cannot be written down is not shown either.
        let mut changed = self.catalogue().clone();
        for written in changed.add(record) {
            record::write(&self.record_path(&written.id), &*written, Durability::Synced)
                .attempt("write image record")?;
        }
        step::reached("image.written");
        *self.catalogue() = changed;
        info!(image = %id, source = ?source, "Image is here");
        self.catalogue().get(&id).ok_or_else(|| ImageError::not_found("image vanished"))
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ImageError> + Send + 'static,
) -> Result<T, ImageError> {
    let joined = tokio::task::spawn_blocking(work).await;
    joined.unwrap_or_else(|error| Err(ImageError::bad_content(format!("image work ended: {error}"))))
}

fn now_ns() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

mod bring;
pub mod export;
mod folder;
mod keep;
mod pull;
pub mod verify;

#[cfg(test)]
mod tests;
