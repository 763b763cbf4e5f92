//! Image pulls: single-flight per reference and credentials, parallel downloads, ordered unpacking.
//!
//! Concurrent requests for the same reference, credentials, and platform share one pull, which is cancelled when the
//! last caller is. Layers download in parallel and are unpacked in order as they arrive. Implements spec 09b §4.3.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex, PoisonError, Weak, atomic::Ordering},
    time::Duration,
};

use futures::{FutureExt, StreamExt, TryStreamExt, stream};
use tokio::sync::{Semaphore, oneshot};
use tracing::info;

use super::{ImageStoreInner, blocking, now_ns};
use crate::images::{
    archive::ArchiveImage,
    catalogue::references,
    digest::{Digest, chain_ids},
    error::{ImageError, ImageErrorKind, IoContext},
    layers::Lease,
    model::{self, Descriptor, LONGEST_CONFIG, LONGEST_MANIFEST, ManifestOrIndex},
    names::Name,
    platform,
    progress::{ImageProgress, LayerProgress, Stage},
    record::{ImageOrigin, ImageRecord, Platform},
    registry::{RegistryCredentials, Session, session::ResolvedManifest},
};
use crate::store::record::{self, Durability};
use berth_sys::single_flight::{Role, SingleFlight};

/// Upper limit of concurrent downloads of one pull, regardless of the configuration.
const MOST_DOWNLOADS: usize = 64;
/// Maximum nesting depth of indexes.
const DEEPEST: usize = 3;
/// Free space required in addition to three times the download size, bytes.
const MARGIN: u64 = 64 << 20;
/// Interval of progress log lines.
const PROGRESS_LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Download timeout if the configuration sets none.
const FOR_EVER: Duration = Duration::from_secs(365 * 24 * 3600);

type Outcome = Result<Arc<ImageRecord>, ImageError>;

/// Image reference to pull, with credentials and platform.
#[derive(Clone)]
pub(super) struct PullRequest {
    pub(super) name: Name,
    pub(super) credentials: RegistryCredentials,
    /// Requested platform; none: this machine's, and a single image for another platform is accepted.
    pub(super) machine: Option<Platform>,
}

/// Single-flight key: name, credentials, platform.
type Key = (String, Digest, Option<String>);

/// Running pulls.
pub(super) struct PullGroup {
    slots: Arc<Semaphore>,
    /// Concurrent downloads of one pull.
    most: usize,
    running: SingleFlight<Key, Outcome>,
    /// Progress of the running pulls.
    progress: Mutex<BTreeMap<Key, Weak<ImageProgress>>>,
    blobs: Arc<Blobs>,
}

/// Reference counts of blobs in use, and a lock per download.
#[derive(Default)]
pub(super) struct Blobs {
    reference_counts: Mutex<BTreeMap<Digest, usize>>,
    download_locks: Mutex<BTreeMap<Digest, Arc<tokio::sync::Mutex<()>>>>,
}

/// Protects blobs from collection.
pub(super) struct BlobLease {
    of: Arc<Blobs>,
    digests: Vec<Digest>,
}

impl Drop for BlobLease {
    fn drop(&mut self) {
        let mut counts = self.of.reference_counts.lock().unwrap_or_else(PoisonError::into_inner);
        let mut locks = self.of.download_locks.lock().unwrap_or_else(PoisonError::into_inner);
        for digest in &self.digests {
            let left = counts.get(digest).map_or(0, |count| count.saturating_sub(1));
            if left == 0 {
                counts.remove(digest);
                locks.remove(digest);
            } else {
                counts.insert(*digest, left);
            }
        }
    }
}

impl Blobs {
    pub(super) fn hold(self: &Arc<Self>, digests: Vec<Digest>) -> BlobLease {
        let mut counts = self.reference_counts.lock().unwrap_or_else(PoisonError::into_inner);
        digests.iter().for_each(|digest| *counts.entry(*digest).or_default() += 1);
        BlobLease { of: Arc::clone(self), digests }
    }

    fn download_lock(&self, digest: Digest) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = self.download_locks.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(locks.entry(digest).or_default())
    }
}

impl PullGroup {
    pub(super) fn new(most: usize) -> Self {
        let most = most.clamp(1, MOST_DOWNLOADS);
        let slots = Arc::new(Semaphore::new(2 * most));
        Self { slots, most, running: SingleFlight::default(), progress: Mutex::default(), blobs: Arc::default() }
    }

    /// Blobs in use by pulls.
    pub(super) fn blobs_in_use(&self) -> Vec<Digest> {
        self.blobs.reference_counts.lock().unwrap_or_else(PoisonError::into_inner).keys().copied().collect()
    }

    /// Joins the running pull with the same key, or starts one. The pull is canceled with its last caller.
    pub(super) fn join(
        inner: &Arc<ImageStoreInner>,
        asked: PullRequest,
    ) -> (impl Future<Output = Outcome> + Send + 'static + use<>, Arc<ImageProgress>) {
        let Self { running, progress, .. } = &inner.pulls;
        let machine = asked.machine.as_ref().map(|machine| format!("{machine:?}"));
        let key = (asked.name.to_string(), asked.credentials.key(), machine);
        // Locked across both, so that a pull that is joined has its progress here.
        let mut all = progress.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, progress| progress.strong_count() > 0);
        let new: Arc<ImageProgress> = Arc::default();
        let start = || pull(Arc::clone(inner), asked, Arc::clone(&new));
        let (work, role) = running.join_or_start(key.clone(), start);
        let progress = match role {
            Role::First => {
                all.insert(key, Arc::downgrade(&new));
                new
            }
            Role::Joined => all.get(&key).and_then(Weak::upgrade).unwrap_or(new), // absent if it has just ended
        };
        let work = work.map(|outcome| {
            outcome.unwrap_or_else(|panicked| Err(ImageError::new(ImageErrorKind::Unknown, panicked.to_string())))
        });
        (work, progress)
    }
}

async fn pull(inner: Arc<ImageStoreInner>, asked: PullRequest, progress: Arc<ImageProgress>) -> Outcome {
    let name = &asked.name;
    let result = {
        let mut work = std::pin::pin!(pull_now(&inner, &asked, &progress, PresentImagePolicy::Taken));
        loop {
            match tokio::time::timeout(PROGRESS_LOG_INTERVAL, &mut work).await {
                Ok(result) => break result,
                Err(_) => {
                    let shown = progress.snapshot();
                    let sum = |of: fn(&LayerProgress) -> u64| shown.iter().map(of).fold(0u64, u64::saturating_add);
                    let done = shown.iter().filter(|layer| layer.stage == Stage::Done).count();
                    let (bytes, of) = (sum(|layer| layer.done), sum(|layer| layer.size));
                    info!(image = %name, bytes, of, layersDone = done, layers = shown.len(), "Pulling");
                }
            }
        }
    };
    // Compressed layers are garbage now, whether or not the pull succeeded.
    inner.garbage.notify_one();
    result.map_err(|error| error.within(format!("failed to pull and unpack image \"{name}\"")))
}

/// Treatment of an image that is already present.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PresentImagePolicy {
    /// Use it: nothing is downloaded.
    Taken,
    /// It is broken: download what is missing.
    Fetched,
}

pub(super) async fn pull_now(
    inner: &Arc<ImageStoreInner>,
    asked: &PullRequest,
    progress: &Arc<ImageProgress>,
    known: PresentImagePolicy,
) -> Outcome {
    let mut session = {
        let (inner, PullRequest { name, credentials, .. }) = (Arc::clone(inner), asked.clone());
        blocking(move || {
            let settings = &inner.settings;
            let patience = if settings.idle_timeout.is_zero() { FOR_EVER } else { settings.idle_timeout };
            let (content, slots) = (inner.content.clone(), Arc::clone(&inner.pulls.slots));
            Session::new(&name, &credentials, &settings.registries, content, slots, patience)
        })
        .await?
    };
    session.progress = Arc::clone(progress);
    let resolved = session.resolve().await?;
    // The registry has just authorized this caller.
    if known == PresentImagePolicy::Taken {
        let (here, asked, resolved) = (Arc::clone(inner), asked.clone(), resolved.clone());
        if let Some(known) = blocking(move || here.add_reference(&asked, &resolved)).await? {
            return Ok(known);
        }
    }
    let found = documents(&session, resolved, asked).await?;
    fetch(inner, session, found).await
}

/// Downloads manifest and configuration for the platform.
async fn documents(
    session: &Session,
    resolved: ResolvedManifest,
    asked: &PullRequest,
) -> Result<ArchiveImage, ImageError> {
    let machine = asked.machine.clone().unwrap_or_else(platform::host);
    let target_bytes = resolved.bytes.to_vec();
    let (mut manifest, mut bytes) = (resolved.target.clone(), resolved.bytes);
    for _ in 0..DEEPEST {
        match model::parse_manifest_or_index(&bytes, &manifest.media_type)? {
            ManifestOrIndex::Index(index) => {
                manifest = platform::choose(&index, &machine)?.clone();
                bytes = session.document(&manifest, LONGEST_MANIFEST).await?;
            }
            ManifestOrIndex::Manifest(parsed) => {
                let config = session.document(&parsed.config, LONGEST_CONFIG).await?.to_vec();
                if asked.machine.is_some() {
                    let image_platform = model::config(&config, parsed.layers.len())?.platform;
                    platform::rank_image(&image_platform, &machine).ok_or_else(platform::no_match)?;
                }
                return Ok(ArchiveImage {
                    names: vec![asked.name.clone()],
                    target: resolved.target,
                    target_bytes,
                    manifest,
                    manifest_bytes: bytes.to_vec(),
                    parsed,
                    config,
                    layers: Vec::new(),
                });
            }
        }
    }
    Err(ImageError::bad_content("indexes are nested too deeply"))
}

/// Downloads missing layers and unpacks them as they arrive.
async fn fetch(inner: &Arc<ImageStoreInner>, session: Session, found: ArchiveImage) -> Outcome {
    let (known, lease) = {
        let (inner, found) = (Arc::clone(inner), found.clone());
        blocking(move || inner.known_layers(&found)).await?
    };
    let wanted: Vec<Descriptor> = found.parsed.layers.iter().skip(known).cloned().collect();
    inner.guard_disk(&wanted)?;
    let bytes = wanted.iter().fold(0_u64, |sum, layer| sum.saturating_add(layer.size));
    session.progress.begin(&found.parsed.layers);
    let _hold = inner.pulls.blobs.hold(wanted.iter().map(|layer| layer.digest).collect());
    let (senders, receivers): (Vec<_>, Vec<_>) = wanted.iter().map(|_| oneshot::channel::<()>()).unzip();
    let downloads = stream::iter(wanted.into_iter().zip(senders))
        .map(|(layer, sender)| {
            let (session, turn) = (&session, inner.pulls.blobs.download_lock(layer.digest));
            async move {
                let _turn = turn.lock().await;
                session.layer(&layer).await?;
                // If the receiver is gone, unpacking failed and reports the reason.
                let _ = sender.send(());
                Ok::<(), ImageError>(())
            }
        })
        .buffer_unordered(inner.pulls.most)
        .try_collect::<()>();
    let unpacking = {
        let (inner, found, progress) = (Arc::clone(inner), found.clone(), Arc::clone(&session.progress));
        blocking(move || {
            let mut receivers = receivers.into_iter().map(Some).collect::<Vec<_>>();
            let record = inner.commit(&found, ImageOrigin::Pull, &progress, |at| {
                let gone = || ImageError::new(ImageErrorKind::Cancelled, "pull was cancelled");
                let slot = at.checked_sub(known).and_then(|at| receivers.get_mut(at)).and_then(Option::take);
                slot.ok_or_else(gone)?.blocking_recv().map_err(|_| gone())?;
                let layer = found.parsed.layers.get(at).ok_or_else(gone)?;
                inner.content.open_blob(&layer.digest)
            });
            drop(lease);
            record
        })
    };
    // A failed download drops its sender, which ends the unpacking.
    match futures::join!(downloads, unpacking) {
        (Err(error), _) => Err(error),
        (Ok(()), outcome) => {
            inner.tally.pulled_bytes.fetch_add(bytes, Ordering::Relaxed);
            outcome
        }
    }
}

impl ImageStoreInner {
    /// Adds the reference to an image that is already present with this digest.
    fn add_reference(
        &self,
        asked: &PullRequest,
        resolved: &ResolvedManifest,
    ) -> Result<Option<Arc<ImageRecord>>, ImageError> {
        let (name, target) = (&asked.name, resolved.target.digest);
        let machine = asked.machine.clone().unwrap_or_else(platform::host);
        let manifest = match model::parse_manifest_or_index(&resolved.bytes, &resolved.target.media_type)? {
            ManifestOrIndex::Manifest(_) => target,
            ManifestOrIndex::Index(index) => platform::choose(&index, &machine)?.digest,
        };
        let is_wanted = |known: &Arc<ImageRecord>| {
            let is_for_it = asked.machine.is_none() || platform::rank_image(&known.platform, &machine).is_some();
            is_for_it && self.layers.has_all(&known.layers)
        };
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut changed = self.catalogue().clone();
        let Some(known) = changed.targeting(&target, &manifest).filter(is_wanted) else {
            return Ok(None);
        };
        let refs = references(name, target, now_ns());
        let id = known.id;
        for written in changed.add(ImageRecord { refs, ..ImageRecord::clone(&known) }) {
            record::write(&self.record_path(&written.id), &*written, Durability::Synced)
                .attempt("write image record")?;
        }
        *self.catalogue() = changed;
        info!(image = %id, name = %name, "Image is already present");
        Ok(self.catalogue().get(&id))
    }

    /// Protects compressed layers from collection until a record names them.
    pub(super) fn hold_packed(&self, layers: &[Descriptor]) -> BlobLease {
        self.pulls.blobs.hold(layers.iter().map(|layer| layer.digest).collect())
    }

    /// Number of layers present, counted from the bottom, and a lease of them.
    fn known_layers(&self, found: &ArchiveImage) -> Result<(usize, Lease), ImageError> {
        let config = model::config(&found.config, found.parsed.layers.len())?;
        let mut lease = self.layers.lease();
        let absent = || Err::<io::Empty, _>(ImageError::not_found("layer not found"));
        for (chain, diff_id) in chain_ids(&config.diff_ids).into_iter().zip(&config.diff_ids) {
            if self.layers.extend(&mut lease, chain, *diff_id, absent).is_err() {
                break;
            }
        }
        Ok((lease.numbers().len(), lease))
    }

    /// Checks that the disk has space for the layers.
    ///
    /// # Errors
    /// `not enough disk space`.
    fn guard_disk(&self, layers: &[Descriptor]) -> Result<(), ImageError> {
        let disk = rustix::fs::statvfs(&self.settings.root).attempt("stat filesystem")?;
        let free = disk.f_bavail.saturating_mul(disk.f_frsize).saturating_sub(self.layers.policy().keep_free);
        let packed = layers.iter().fold(0u64, |sum, layer| sum.saturating_add(layer.size));
        if layers.is_empty() || packed.saturating_mul(3).saturating_add(MARGIN) <= free {
            return Ok(());
        }
        Err(ImageError::new(ImageErrorKind::ResourceExhausted, "not enough disk space"))
    }
}

#[cfg(test)]
mod faulty_registry_tests;
#[cfg(test)]
mod option_tests;
#[cfg(test)]
mod tests;
