//! Image garbage collector: removes unused images by age and disk usage (spec 03b §4).
//!
//! One task owns the image state; eviction calls it through a channel, the node status reads its list.
//!
//! The state survives restarts (spec 03b §15 item 6), so that ages are kept; for an image that was
//! never used, the time of first detection counts as its last use.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::StreamExt;
use jiff::Timestamp;
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, MissedTickBehavior, interval, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{
    gc_ages::{Ages, AgesFile},
    gc_rank::{Demand, DiskSpace, GcPolicy, ImageUse, demand, human, removable, too_old},
    gc_watch::{APART, DiskUsageWatcher},
    policy::aggregate,
    records::Records,
};
use berth_config::GoDuration;
use berth_cri::{ImageService, RuntimeService};
use berth_metrics::{CollectReason, Images};
use berth_otel::Scope;
use berth_ports::{Clock, EventRecord, EventSink};
use berth_proto::cri;

const PERIOD: Duration = Duration::from_secs(300);
const LIST_PERIOD: Duration = Duration::from_secs(30);
/// How long an image provided to a pod counts as used before a container shows it.
const USE_GRACE: Duration = Duration::from_secs(300);
const STATFS_DEADLINE: Duration = Duration::from_secs(10);
const STATUS_CALLS: usize = 8;
/// Maximum amount to free, as it appears in error texts.
const ALL: u64 = i64::MAX.unsigned_abs();

/// Returns capacity and available bytes of the filesystem at a path. Blocks.
pub type DiskSpaceOf = Arc<dyn Fn(&Path) -> io::Result<DiskSpace> + Send + Sync>;

/// Capacity and available bytes of the filesystem at `path`, by `statvfs`. Blocks.
///
/// # Errors
/// The error of the system call.
pub fn statvfs_disk_space(path: &Path) -> io::Result<DiskSpace> {
    let stat = rustix::fs::statvfs(path)?;
    Ok(DiskSpace {
        capacity: stat.f_blocks.saturating_mul(stat.f_frsize),
        available: stat.f_bavail.saturating_mul(stat.f_frsize),
    })
}

/// Dependencies of the collector.
pub(super) struct CollectorDeps {
    pub(super) images: Arc<dyn ImageService>,
    pub(super) runtime: Arc<dyn RuntimeService>,
    pub(super) events: Arc<dyn EventSink>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) metrics: Arc<Images>,
    pub(super) records: Option<Records>,
    pub(super) room: DiskSpaceOf,
}

/// Why a garbage collection failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct GcError(pub String);

type GcResult = Result<u64, GcError>;

/// Sends deletion requests and image uses to the garbage collector, and receives its image list.
pub(super) struct CollectorHandle {
    ask: mpsc::Sender<oneshot::Sender<GcResult>>,
    used: Arc<Mutex<HashMap<String, Timestamp>>>,
    listed: watch::Receiver<Arc<[cri::Image]>>,
}

impl CollectorHandle {
    /// Marks an image as used because it was just provided to a pod: before any container shows it.
    pub(super) fn used(&self, id: &str, now: Timestamp) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        expire_used(&mut used, now);
        used.insert(id.to_owned(), now);
    }

    pub(super) fn listed(&self) -> watch::Receiver<Arc<[cri::Image]>> {
        self.listed.clone()
    }

    pub(super) async fn delete_unused(&self) -> GcResult {
        let (answer, wait) = oneshot::channel();
        let gone = || GcError("image garbage collector is not running".to_owned());
        self.ask.send(answer).await.map_err(|_| gone())?;
        wait.await.map_err(|_| gone())?
    }
}

/// Image garbage collector: owner of the image state.
pub(super) struct Collector {
    deps: CollectorDeps,
    policy: GcPolicy,
    state_file: AgesFile,
    ages: BTreeMap<String, Ages>,
    /// Images mounted as volumes, by container ID; a container's mounts never change.
    mounted: HashMap<String, Vec<String>>,
    started: Timestamp,
    detected_once: bool,
    failures: u32,
    asked: mpsc::Receiver<oneshot::Sender<GcResult>>,
    used: Arc<Mutex<HashMap<String, Timestamp>>>,
    list: watch::Sender<Arc<[cri::Image]>>,
    watch: DiskUsageWatcher,
    /// Last event per reason, and when it was recorded.
    last_events: BTreeMap<&'static str, (String, Instant)>,
}

/// Result of one detection.
struct DetectionResult {
    images: Vec<ImageUse>,
    listed: Vec<cri::Image>,
}

impl Collector {
    pub(super) fn new(deps: CollectorDeps, policy: GcPolicy, state_file: PathBuf) -> (Self, CollectorHandle) {
        let (ask, asked) = mpsc::channel(1);
        let (list, listed) = watch::channel(Arc::from([]));
        let used: Arc<Mutex<HashMap<String, Timestamp>>> = Arc::default();
        let handle = CollectorHandle { ask, used: used.clone(), listed };
        let collector = Self {
            started: deps.clock.now(),
            watch: DiskUsageWatcher::new(deps.room.clone(), policy),
            deps,
            policy,
            state_file: AgesFile::new(state_file),
            ages: BTreeMap::new(),
            mounted: HashMap::new(),
            detected_once: false,
            failures: 0,
            asked,
            used,
            list,
            last_events: BTreeMap::new(),
        };
        (collector, handle)
    }

    /// Runs until stopped.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        self.ages = self.state_file.load().await;
        let (mut collecting, mut listing) = (interval(PERIOD), interval(LIST_PERIOD));
        collecting.set_missed_tick_behavior(MissedTickBehavior::Delay);
        listing.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                Some(answer) = self.asked.recv() => {
                    let freed = self.delete_unused().await;
                    // the caller may have given up
                    let _ = answer.send(freed);
                }
                _ = listing.tick() => self.publish_list().await,
                _ = collecting.tick(), if !self.policy.is_off() => {
                    let rests = self.watch.remaining_interval();
                    if !rests.is_zero() {
                        collecting.reset_after(rests);
                    } else if !self.round().await && !self.watch.has_place() {
                        collecting.reset_after(APART); // nothing else would retry
                    }
                }
                () = self.watch.wait_until_crossed() => if self.round().await {
                    collecting.reset();
                },
            }
        }
    }

    async fn publish_list(&self) {
        match self.deps.images.list_images().await {
            Ok(mut images) => {
                images.sort_by(|a, b| b.size.cmp(&a.size).then_with(|| b.id.cmp(&a.id)));
                self.list.send_replace(images.into());
            }
            Err(error) => warn!(err = %error, "Failed to list images"),
        }
    }

    /// Runs one round; returns whether it succeeded. From the second consecutive failure on an event is
    /// recorded.
    async fn round(&mut self) -> bool {
        let span = berth_otel::root_span(Scope::Images, "Images/GarbageCollect", Vec::new);
        let collected = span.run(self.collect()).await;
        drop(span);
        match collected {
            Ok(()) => {
                self.failures = 0;
                self.last_events.clear();
                true
            }
            Err(error) => {
                self.watch.tried();
                self.failures = self.failures.saturating_add(1);
                if self.failures > 1 {
                    warn!(err = %error, failures = self.failures, "Image garbage collection failed multiple times in a row");
                    self.record_event("ImageGCFailed", error.to_string());
                } else {
                    warn!(err = %error, "Image garbage collection failed once. Stats initialization may not have completed yet");
                }
                false
            }
        }
    }

    /// Records an event on the node; an identical one at most once per period, however often it is
    /// retried.
    fn record_event(&mut self, reason: &'static str, text: String) {
        let is_old = |(last, at): &(String, Instant)| *last == text && at.elapsed() < PERIOD;
        if !self.last_events.get(reason).is_some_and(is_old) {
            self.last_events.insert(reason, (text.clone(), Instant::now()));
            self.deps.events.record(EventRecord::node_warning(reason, text));
        }
    }

    async fn collect(&mut self) -> Result<(), GcError> {
        let began = self.deps.clock.now();
        let mut detected = self.detect().await?;
        let mut errors = Vec::new();
        let by_age = self.age_pass(&mut detected.images, began).await;
        let by_space = self.space_pass(&mut detected.images, began).await;
        let mut removed = 0;
        for pass in [by_age, by_space] {
            match pass {
                Ok(count) => removed += count,
                Err(error) => errors.push(error.0),
            }
        }
        if !errors.is_empty() {
            return Err(GcError(aggregate(&errors)));
        }
        self.prune(detected.listed, removed, began).await
    }

    /// Removes the pull records of images that no longer exist, by a list of the remaining ones.
    async fn prune(&self, listed: Vec<cri::Image>, removed: usize, began: Timestamp) -> Result<(), GcError> {
        let Some(records) = &self.deps.records else { return Ok(()) };
        let survivors = if removed == 0 {
            listed
        } else {
            self.deps.images.list_images().await.map_err(|e| GcError(e.to_string()))?
        };
        records.prune(survivors, began).await.map_err(|e| GcError(format!("failed to drop image records: {e}")))
    }

    async fn age_pass(&mut self, images: &mut Vec<ImageUse>, now: Timestamp) -> Result<usize, GcError> {
        let old: Vec<ImageUse> = too_old(images, &self.policy, now).into_iter().cloned().collect();
        let done = self.remove_all(images, old, u64::MAX, CollectReason::Age).await;
        if done.errors.is_empty() {
            return Ok(done.removed);
        }
        let age = GoDuration::from_nanos(i64::try_from(self.policy.maximum_age.as_nanos()).unwrap_or(i64::MAX));
        let errors = aggregate(&done.errors);
        Err(GcError(format!("wanted to free images older than {age}, encountered errors in image deletion: {errors}")))
    }

    async fn space_pass(&mut self, images: &mut Vec<ImageUse>, began: Timestamp) -> Result<usize, GcError> {
        if self.policy.high_percent >= 100 {
            return Ok(0);
        }
        let room = self.room().await?;
        let (wanted, percent) = match demand(&self.policy, room) {
            Demand::Enough => return Ok(0),
            Demand::InvalidCapacity => {
                let text = "invalid capacity 0 on image filesystem";
                self.deps.events.record(EventRecord::node_warning("InvalidDiskCapacity", text));
                return Err(GcError(text.to_owned()));
            }
            Demand::Free { bytes, percent } => (bytes, percent),
        };
        info!(
            usage = percent,
            highThreshold = self.policy.high_percent,
            amountToFree = wanted,
            lowThreshold = self.policy.low_percent,
            "Disk usage on image filesystem is over the high threshold, trying to free bytes down to the low threshold"
        );
        let done = self.free(images, wanted, began).await;
        self.watch.tried();
        let done = done?;
        if done.freed >= wanted {
            return Ok(done.removed);
        }
        let text = format!(
            "Insufficient free disk space on the node's image filesystem ({percent}% of {} used). Failed to free \
             sufficient space by deleting unused images (freed {} bytes). Investigate disk usage, as it could be used \
             by active images, logs, volumes, or other data.",
            human(room.capacity),
            done.freed
        );
        self.record_event("FreeDiskSpaceFailed", text.clone());
        Err(GcError(text))
    }

    async fn delete_unused(&mut self) -> GcResult {
        let began = self.deps.clock.now();
        let mut detected = self.detect().await?;
        let done = self.free(&mut detected.images, ALL, began).await?;
        if let Err(error) = self.prune(detected.listed, done.removed, began).await {
            warn!(err = %error, "Failed to prune image records");
        }
        Ok(done.freed)
    }

    async fn free(&mut self, images: &mut Vec<ImageUse>, wanted: u64, began: Timestamp) -> Result<Removal, GcError> {
        let victims: Vec<ImageUse> = removable(images, &self.policy, began).into_iter().cloned().collect();
        let done = self.remove_all(images, victims, wanted, CollectReason::Space).await;
        if done.errors.is_empty() {
            return Ok(done);
        }
        Err(GcError(format!(
            "wanted to free {wanted} bytes, but freed {} bytes space with errors in image deletion: {}",
            done.freed,
            aggregate(&done.errors)
        )))
    }

    async fn remove_all(
        &mut self,
        images: &mut Vec<ImageUse>,
        victims: Vec<ImageUse>,
        wanted: u64,
        reason: CollectReason,
    ) -> Removal {
        let mut done = Removal::default();
        for image in victims {
            if done.freed >= wanted {
                break;
            }
            if self.recently_provided(self.deps.clock.now()).contains_key(&image.id) {
                debug!(imageID = %image.id, "Skipping image, it is in use again");
                continue;
            }
            info!(imageID = %image.id, size = image.size, reason = ?reason, "Removing image to free bytes");
            let spec = cri::ImageSpec { image: image.id.clone(), ..Default::default() };
            match self.deps.images.remove_image(spec).await {
                Ok(()) => {
                    done.freed = done.freed.saturating_add(image.size);
                    done.removed += 1;
                    self.ages.remove(&image.id);
                    images.retain(|known| known.id != image.id);
                    self.deps.metrics.collected(reason, image.size);
                }
                Err(error) => done.errors.push(error.to_string()),
            }
        }
        done
    }

    /// Images recently provided to pods, and when. Their containers may not exist yet.
    fn recently_provided(&self, now: Timestamp) -> HashMap<String, Timestamp> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        expire_used(&mut used, now);
        used.clone()
    }

    async fn room(&mut self) -> Result<DiskSpace, GcError> {
        let info = self.deps.images.image_fs_info().await.map_err(|e| GcError(e.to_string()))?;
        let Some(filesystem) = info.image_filesystems.into_iter().next() else {
            return Err(GcError("missing image stats: the runtime reports no image filesystem".to_owned()));
        };
        let path = PathBuf::from(filesystem.fs_id.unwrap_or_default().mountpoint);
        let shown = path.display();
        match timeout(STATFS_DEADLINE, self.watch.room(&path)).await {
            Ok(Ok(room)) => Ok(room),
            Ok(Err(error)) => Err(GcError(format!("failed to read the image filesystem at \"{shown}\": {error}"))),
            Err(_) => {
                Err(GcError(format!("timed out reading the image filesystem at \"{shown}\" after {STATFS_DEADLINE:?}")))
            }
        }
    }

    /// Lists all images and containers, and updates the image state.
    async fn detect(&mut self) -> Result<DetectionResult, GcError> {
        let now = self.deps.clock.now();
        let failed = |e: berth_cri::CriError| GcError(e.to_string());
        let handed_out = self.recently_provided(now);
        let listed = self.deps.images.list_images().await.map_err(failed)?;
        let containers = self.deps.runtime.list_containers(None).await.map_err(failed)?;
        let in_use = self.references(&containers).await.map_err(failed)?;
        let first_detected = if self.detected_once { now } else { self.started };
        self.detected_once = true;
        // An image without an ID cannot be removed.
        if let Some(nameless) = listed.iter().find(|image| image.id.is_empty()) {
            let name = nameless.repo_tags.iter().chain(&nameless.repo_digests).next().map_or("", String::as_str);
            self.record_event("InvalidImageID", format!("ImageID is not valid, skipping, image: {name}"));
        }
        let images: Vec<ImageUse> = listed
            .iter()
            .filter(|image| !image.id.is_empty())
            .map(|image| {
                let ages = self.ages.entry(image.id.clone()).or_insert(Ages { first_detected, last_used: None });
                // The clock may have been set back: a time in the future would keep an image until
                // then.
                *ages = Ages { first_detected: ages.first_detected.min(now), last_used: ages.last_used.min(Some(now)) };
                let names = std::iter::once(&image.id).chain(&image.repo_tags).chain(&image.repo_digests);
                let busy = names.into_iter().any(|name| in_use.contains(name));
                let handed = handed_out.get(&image.id).copied();
                let used = if busy { Some(now) } else { handed };
                ages.last_used = ages.last_used.max(used);
                ImageUse {
                    id: image.id.clone(),
                    first_detected: ages.first_detected,
                    last_used: ages.last_used,
                    size: image.size,
                    pinned: image.pinned,
                    in_use: busy || handed.is_some(),
                }
            })
            .collect();
        let present: HashSet<&str> = listed.iter().map(|image| image.id.as_str()).collect();
        self.ages.retain(|id, _| present.contains(id.as_str()));
        self.state_file.save(&self.ages).await;
        Ok(DetectionResult { images, listed })
    }

    /// All names by which containers, running or not, refer to images.
    async fn references(&mut self, containers: &[cri::Container]) -> berth_cri::CriResult<HashSet<String>> {
        let ids: HashSet<&str> = containers.iter().map(|c| c.id.as_str()).collect();
        self.mounted.retain(|id, _| ids.contains(id.as_str()));
        let new: Vec<String> =
            containers.iter().filter(|c| !self.mounted.contains_key(&c.id)).map(|c| c.id.clone()).collect();
        let runtime = self.deps.runtime.clone();
        let statuses = futures::stream::iter(new).map(|id| {
            let runtime = runtime.clone();
            async move {
                let status = runtime.container_status(&id).await;
                (id, status)
            }
        });
        let statuses: Vec<_> = statuses.buffer_unordered(STATUS_CALLS).collect().await;
        for (id, status) in statuses {
            match status {
                Ok(status) => {
                    let images = status.mounts.into_iter().filter_map(|mount| mount.image).map(|image| image.image);
                    self.mounted.insert(id, images.collect());
                }
                // deleted since the list
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(error),
            }
        }
        let own = containers.iter().flat_map(|c| {
            let image = c.image.as_ref().map(|spec| spec.image.clone());
            [Some(c.image_id.clone()), Some(c.image_ref.clone()), image]
        });
        let volumes = self.mounted.values().flatten().cloned();
        Ok(own.flatten().chain(volumes).filter(|name| !name.is_empty()).collect())
    }
}

/// Removes expired entries; caps times at `now`, because the clock may have been set back.
fn expire_used(used: &mut HashMap<String, Timestamp>, now: Timestamp) {
    used.retain(|_, at| {
        *at = (*at).min(now);
        Duration::try_from(now.duration_since(*at)).is_ok_and(|age| age < USE_GRACE)
    });
}

#[derive(Default)]
struct Removal {
    removed: usize,
    freed: u64,
    errors: Vec<String>,
}
