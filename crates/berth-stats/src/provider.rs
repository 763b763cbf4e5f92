//! Statistics provider: builds stats and metrics pages from samples, cached for one second.
//!
//! A page is built on request when the cached one, or the sample behind it, is older than [`MEMO`]; concurrent requests
//! receive the same bytes. The three pages share a recent sample and extend it if it is too shallow. While pages are
//! requested, runtime statistics of writable layers are at most [`RUNTIME_AGE`] old, open files [`FILES_AGE`], logs
//! [`super::LOGS_AGE`], volumes `volumeStatsAggPeriod`. Implements spec 04b §7-11.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use futures::future::join_all;
use tokio::time::{Instant, timeout};
use tracing::debug;

use super::{
    cadvisor_page::{self, Counts, MountedFileSystem},
    config::{StatsConfig, StatsDeps},
    disk::FileSystem,
    disk_measurer::{Measurement, MeasurementHandle, MeasurementTasks, Measurements},
    disk_usages::{Targets, targets},
    encoding_cache::{EncodingCache, PageCompression},
    filesystems,
    host::{self, DiskCounters},
    mounts::Mounts,
    open_files,
    pods::{ReportedPod, reported_pods},
    reader::CgroupReader,
    reading::Depth,
    resource_page, runtime_report,
    single_flight_cache::SingleFlightCache,
    snapshot::{PodUsage, Sampler, Snapshot, wall},
    summary::{Form, PodPaths, RuntimePod, RuntimeReport, StatsSummary},
    summary_builder, summary_json,
    system_groups::SystemGroups,
};
use berth_metrics::{StatsSource, exposition::ExpositionFormat};
use berth_sys::{blocking_pool::BlockingPool, mount_table};
use berth_types::{PodUid, SandboxId};

/// Maximum age of a cached page, and of the sample behind it.
pub const MEMO: Duration = Duration::from_secs(1);
/// Maximum age of the runtime's statistics before they are requested again.
pub const RUNTIME_AGE: Duration = Duration::from_secs(10);
/// Maximum age of open file counts.
pub const FILES_AGE: Duration = Duration::from_secs(30);
/// Maximum age of file system usage on the cAdvisor page.
const DISKS_AGE: Duration = Duration::from_secs(10);
/// Maximum age of the sandbox images.
const IMAGES_AGE: Duration = Duration::from_secs(600);
/// Timeout of a page for a value that has never been available yet.
const PATIENCE: Duration = Duration::from_secs(2);
/// Timeout of one sample, and of every other blocking operation.
const LIMIT: Duration = Duration::from_secs(10);
/// Threads of each kind of work: reads of cgroups, walks of disks, and writes of pages.
const THREADS: usize = 4;
/// Time without requests after which open cgroup files are closed.
const IDLE: Duration = Duration::from_secs(120);
/// Retention of a cached page after its last build.
const KEEP: Duration = Duration::from_secs(5);
/// Retention of all other cached values.
const KEEP_LONG: Duration = Duration::from_secs(1800);

type Page = Result<Bytes, String>;
/// A sample, and when its oldest part was read.
type SampleResult = Result<(Instant, Arc<Snapshot>), String>;

/// The Prometheus pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MetricsPage {
    /// `/metrics/resource`
    Resource,
    /// `/metrics/cadvisor`
    Cadvisor,
}

/// Builds and caches the statistics pages.
#[derive(Clone)]
pub struct StatsProvider {
    pub(super) inner: Arc<StatsProviderInner>,
}

pub(super) struct StatsProviderInner {
    pub(super) config: StatsConfig,
    deps: StatsDeps,
    mounts: Option<Mounts>,
    sampler: Option<Arc<Mutex<Sampler>>>,
    system: SystemGroups,
    survey_of_files: MeasurementHandle,
    survey_of_trees: MeasurementHandle,
    pub(super) survey_of_claims: MeasurementHandle,
    last_reading: Mutex<Option<Instant>>,
    samples: [SingleFlightCache<SampleResult>; 3],
    full: SingleFlightCache<Page>,
    short: SingleFlightCache<Page>,
    resource: SingleFlightCache<Bytes>,
    cadvisor: SingleFlightCache<Bytes>,
    resource_forms: EncodingCache,
    cadvisor_forms: EncodingCache,
    report: SingleFlightCache<Arc<RuntimeReport>>,
    pod_stats: SingleFlightCache<Result<Arc<HashMap<SandboxId, RuntimePod>>, String>>,
    root_fs: SingleFlightCache<Option<FileSystem>>,
    files: SingleFlightCache<Arc<Counts>>,
    disks: SingleFlightCache<Arc<Disks>>,
    sandbox_images: SingleFlightCache<Arc<HashMap<String, String>>>,
    readers: BlockingPool,
    walkers: BlockingPool,
    writers: BlockingPool,
}

/// Mounted file systems and block device counters.
#[derive(Default)]
struct Disks {
    mounted: Vec<MountedFileSystem>,
    devices: HashMap<(u32, u32), DiskCounters>,
}

impl StatsProvider {
    /// Returns the provider and the directory measuring tasks, which the caller must run.
    pub fn new(config: StatsConfig, deps: StatsDeps) -> (Self, MeasurementTasks) {
        deps.metrics.set_source(config.source);
        let mounts = mount_table::read().ok().and_then(|table| Mounts::find(&table));
        let sampler = mounts.clone().map(|mounts| {
            let reader = CgroupReader::new(mounts, deps.groups.clone(), config.max_open);
            let (clock, root) = (deps.clock.clone(), config.root.clone());
            Arc::new(Mutex::new(Sampler::new(reader, deps.groups.clone(), clock, root, config.host.max_pids)))
        });
        let (files, of_files) = MeasurementHandle::new(deps.clock.clone(), deps.metrics.clone());
        let (trees, of_trees) = MeasurementHandle::new(deps.clock.clone(), deps.metrics.clone());
        let (claimed, of_claims) = MeasurementHandle::new(deps.clock.clone(), deps.metrics.clone());
        let of_claims = of_claims.with_claimed_volumes(deps.claimed.clone());
        let inner = StatsProviderInner {
            mounts,
            sampler,
            system: SystemGroups::new(&config, deps.groups.above().into_iter().next()),
            survey_of_files: files,
            survey_of_trees: trees,
            survey_of_claims: claimed,
            last_reading: Mutex::default(),
            samples: [SingleFlightCache::new(KEEP), SingleFlightCache::new(KEEP), SingleFlightCache::new(KEEP)],
            full: SingleFlightCache::new(KEEP),
            short: SingleFlightCache::new(KEEP),
            resource: SingleFlightCache::new(KEEP),
            cadvisor: SingleFlightCache::new(KEEP),
            resource_forms: EncodingCache::new(KEEP),
            cadvisor_forms: EncodingCache::new(KEEP),
            report: SingleFlightCache::new(KEEP_LONG),
            pod_stats: SingleFlightCache::new(KEEP),
            root_fs: SingleFlightCache::new(KEEP_LONG),
            files: SingleFlightCache::new(KEEP_LONG),
            disks: SingleFlightCache::new(KEEP_LONG),
            sandbox_images: SingleFlightCache::new(KEEP_LONG),
            readers: BlockingPool::new("statistics", THREADS),
            walkers: BlockingPool::new("statistics", THREADS),
            writers: BlockingPool::new("statistics", THREADS),
            config,
            deps,
        };
        (Self { inner: Arc::new(inner) }, MeasurementTasks(vec![of_files, of_trees, of_claims]))
    }

    /// Returns the JSON document of `/stats/summary`.
    ///
    /// # Errors
    /// A mandatory input could not be read; the text follows `Internal Error: ` in the response.
    pub async fn summary(&self, form: Form) -> Result<Bytes, String> {
        let memo = match form {
            Form::Full => &self.inner.full,
            Form::Short => &self.inner.short,
        };
        let inner = self.inner.clone();
        let page = memo.fresh_since(MEMO, || async move {
            let (since, summary) = match inner.clone().summarise(form).await {
                Ok(summarised) => summarised,
                Err(error) => return (Instant::now(), Err(error)),
            };
            let written = inner.writers.run_within(LIMIT, move || Bytes::from(summary_json::write(&summary))).await;
            (since, written.ok_or_else(|| "timed out encoding the summary".to_owned()))
        });
        page.await.unwrap_or_else(|| Err(FAILED.to_owned()))
    }

    /// Returns a metrics page in the negotiated format.
    ///
    /// # Errors
    /// The page could not be built within its timeout: a valid page is never empty.
    pub async fn metrics(
        &self,
        page: MetricsPage,
        format: ExpositionFormat,
        compressed: PageCompression,
    ) -> Result<Bytes, String> {
        let (plain, forms) = match page {
            MetricsPage::Resource => (self.resource_metrics().await, &self.inner.resource_forms),
            MetricsPage::Cadvisor => (self.cadvisor_metrics().await, &self.inner.cadvisor_forms),
        };
        let page = forms.of(plain, format, compressed, &self.inner.writers).await;
        if page.is_empty() { Err(FAILED.to_owned()) } else { Ok(page) }
    }

    /// Returns the page of `/metrics/resource`; a failure is reported by a metric on the page.
    pub async fn resource_metrics(&self) -> Bytes {
        let (inner, hidden) = (self.inner.clone(), self.inner.config.hidden_metrics);
        let page = self.inner.resource.fresh_since(MEMO, || async move {
            match inner.short_of(Depth::Core).await {
                Ok((since, summary)) => (since, resource_page::write(Ok(&summary), hidden).into()),
                Err(error) => {
                    debug!(err = %error, "Error getting summary for resourceMetric prometheus endpoint");
                    (Instant::now(), resource_page::write(Err(&error), hidden).into())
                }
            }
        });
        page.await.unwrap_or_else(|| resource_page::write(Err(FAILED), hidden).into())
    }

    /// Returns the page of `/metrics/cadvisor`; a failed sample is reported by a metric on it. Empty if not built in
    /// time.
    pub async fn cadvisor_metrics(&self) -> Bytes {
        let inner = self.inner.clone();
        let page = self.inner.cadvisor.fresh_since(MEMO, || async move { inner.cadvisor_page().await });
        page.await.unwrap_or_default()
    }
}

/// Error for callers whose computation panicked or timed out.
const FAILED: &str = "failed to collect statistics";

impl StatsProviderInner {
    /// Returns a sample of at least this depth, no older than [`MEMO`].
    pub(super) async fn sample(self: &Arc<Self>, depth: Depth) -> SampleResult {
        let [core, summary, full] = &self.samples;
        let (own, deeper): (_, &[_]) = match depth {
            Depth::Core => (core, &[summary, full]),
            Depth::Summary => (summary, &[full]),
            Depth::Full => (full, &[]),
        };
        if let Some(young) = deeper.iter().find_map(|memo| memo.cached(MEMO)) {
            return young;
        }
        let inner = self.clone();
        let read = || async move {
            let read = inner.read(depth).await;
            (read.as_ref().map_or_else(|_| Instant::now(), |(since, _)| *since), read)
        };
        own.fresh_since(MEMO, read).await.unwrap_or_else(|| Err(FAILED.to_owned()))
    }

    async fn read(self: Arc<Self>, depth: Depth) -> SampleResult {
        // An extended sample keeps the age of its oldest part.
        let [core, summary, _] = &self.samples;
        let shallower = [(Depth::Core, core), (Depth::Summary, summary)].into_iter().filter(|(own, _)| *own < depth);
        let shallower = shallower.filter_map(|(_, memo)| Some(memo.cached(MEMO)?.ok()?.0)).min();
        let pods = self.pods().await?;
        let sampler =
            self.sampler.clone().ok_or("failed to get root cgroup stats: no cgroup file system is mounted")?;
        let (began, inner) = (Instant::now(), self.clone());
        let read = self.readers.run_within(LIMIT, move || {
            let system = inner.system.all();
            sampler.lock().unwrap_or_else(PoisonError::into_inner).sample(pods, system, depth)
        });
        let snapshot = read.await.ok_or("failed to get root cgroup stats: timed out reading cgroups")?;
        self.deps.metrics.read(began.elapsed(), snapshot.size.0);
        self.close_later();
        Ok((shallower.unwrap_or(began), Arc::new(snapshot)))
    }

    /// Closes the cgroup files after [`IDLE`] without a sample; at most one task waits for that.
    fn close_later(self: &Arc<Self>) {
        let mut last = self.last_reading.lock().unwrap_or_else(PoisonError::into_inner);
        let is_waited_for = last.replace(Instant::now()).is_some();
        if is_waited_for {
            return;
        }
        let inner = Arc::downgrade(self);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(IDLE).await;
                let Some(inner) = inner.upgrade() else { return };
                let mut last = inner.last_reading.lock().unwrap_or_else(PoisonError::into_inner);
                if last.is_none_or(|last| last.elapsed() >= IDLE) {
                    *last = None;
                    break;
                }
            }
            let Some(inner) = inner.upgrade() else { return };
            if let Some(sampler) = inner.sampler.clone() {
                let close = move || sampler.lock().unwrap_or_else(PoisonError::into_inner).close();
                inner.readers.run_within(LIMIT, close).await;
            }
        });
    }

    async fn pods(&self) -> Result<Vec<ReportedPod>, String> {
        let known = match self.deps.observer.known() {
            Some(known) => known,
            None => match timeout(LIMIT, self.deps.observer.list()).await {
                Ok(listed) => listed.map_err(|error| format!("failed to list pod stats: {error}"))?,
                Err(_) => return Err("failed to list pod stats: timed out waiting for the runtime".to_owned()),
            },
        };
        Ok(reported_pods(known.pods.values()))
    }

    pub(super) async fn summarise(self: Arc<Self>, form: Form) -> Result<(Instant, StatsSummary), String> {
        if form == Form::Short {
            return self.short_of(Depth::Summary).await;
        }
        let (snapshot, report, root_fs) =
            tokio::join!(self.sample(Depth::Summary), self.report(), self.root_filesystem());
        let (since, snapshot) = snapshot?;
        let runtime_pods = self.runtime_pod_stats().await?;
        let places = self.places(&snapshot);
        let measured = self.measured(&snapshot, &places).await;
        let summary = summary_builder::build(&summary_builder::SummaryInputs {
            form,
            node: &self.config.node_name,
            booted_at: self.config.host.booted_at,
            snapshot: &snapshot,
            runtime: report.as_deref(),
            runtime_pods: &runtime_pods,
            measured: &measured,
            places: &places,
            root_fs,
        })?;
        Ok((since, summary))
    }

    /// Builds the short form: CPU, memory, and swap. Queries the runtime only if a container's cgroup is unreadable.
    async fn short_of(self: &Arc<Self>, depth: Depth) -> Result<(Instant, StatsSummary), String> {
        let (since, snapshot) = self.sample(depth).await?;
        let runtime_pods = self.runtime_pod_stats().await?;
        let is_missing = snapshot.pods.iter().any(|pod| pod.containers.iter().any(Option::is_none));
        let report = if is_missing { self.report().await } else { None };
        let summary = summary_builder::build(&summary_builder::SummaryInputs {
            form: Form::Short,
            node: &self.config.node_name,
            booted_at: self.config.host.booted_at,
            snapshot: &snapshot,
            runtime: report.as_deref(),
            runtime_pods: &runtime_pods,
            measured: &HashMap::new(),
            places: &HashMap::new(),
            root_fs: None,
        })?;
        Ok((since, summary))
    }

    /// Pod statistics of the runtime if it is the configured source; empty if it does not implement them.
    pub(super) async fn runtime_pod_stats(&self) -> Result<Arc<HashMap<SandboxId, RuntimePod>>, String> {
        if self.config.source == StatsSource::Groups {
            return Ok(Arc::default());
        }
        let runtime = self.deps.runtime.clone();
        let ask = || runtime_report::pods(runtime);
        let result = self.pod_stats.fresh(MEMO, ask).await.unwrap_or_else(|| Err(FAILED.to_owned()));
        result.map_err(|error| format!("failed to list pod stats: {error}"))
    }

    async fn report(&self) -> Option<Arc<RuntimeReport>> {
        let (runtime, images) = (self.deps.runtime.clone(), self.deps.images.clone());
        let ask = || runtime_report::ask(runtime, images);
        self.report.recent(RUNTIME_AGE, PATIENCE, ask).await
    }

    async fn root_filesystem(self: &Arc<Self>) -> Option<FileSystem> {
        let inner = self.clone();
        let ask = || async move {
            let path = inner.config.root_directory.clone();
            inner.walkers.run_within(LIMIT, move || FileSystem::of(&path).ok()).await.flatten()
        };
        self.root_fs.recent(MEMO, PATIENCE, ask).await.flatten()
    }

    fn places(&self, snapshot: &Snapshot) -> HashMap<PodUid, PodPaths> {
        let running = snapshot.pods.iter().filter(|seen| !seen.pod.containers.is_empty());
        running.map(|seen| (seen.pod.id.uid.clone(), self.deps.directories.of(&seen.pod.id))).collect()
    }

    async fn measured(&self, snapshot: &Snapshot, places: &HashMap<PodUid, PodPaths>) -> Measurements {
        let known = |seen: &'_ PodUsage| places.get(&seen.pod.id.uid);
        let pods = snapshot.pods.iter().filter_map(|seen| Some((&seen.pod, known(seen)?)));
        let targets = targets(pods, self.config.volume_period);
        let (files, trees, claimed) = tokio::join!(
            self.survey_of_files.known(targets.files, PATIENCE),
            self.survey_of_trees.known(targets.trees, PATIENCE),
            self.survey_of_claims.known(targets.claimed, PATIENCE),
        );
        let all = files.iter().chain(trees.iter()).chain(claimed.iter());
        Arc::new(all.map(|(path, measured)| (path.clone(), *measured)).collect())
    }

    /// Returns the running pods, their directories, and the measurements known so far; does not wait.
    pub(super) fn known_disk_usage(&self) -> (Vec<(ReportedPod, PodPaths)>, HashMap<PathBuf, Measurement>) {
        let pods = self.running();
        let targets = targets(pods.iter().map(|(pod, places)| (pod, places)), self.config.volume_period);
        let (files, trees) = (self.survey_of_files.ask(targets.files), self.survey_of_trees.ask(targets.trees));
        let claimed = self.survey_of_claims.ask(targets.claimed);
        let all = files.iter().chain(trees.iter()).chain(claimed.iter());
        let all = all.map(|(path, measured)| (path.clone(), *measured)).collect();
        (pods, all)
    }

    pub(super) fn running(&self) -> Vec<(ReportedPod, PodPaths)> {
        let known = self.deps.observer.known().unwrap_or_default();
        let running = reported_pods(known.pods.values()).into_iter().filter(|pod| !pod.containers.is_empty());
        running.map(|pod| (self.deps.directories.of(&pod.id), pod)).map(|(places, pod)| (pod, places)).collect()
    }

    /// Measures directories whose measurement is older than `age`, and waits at most [`PATIENCE`] for the results.
    pub(super) async fn remeasure(&self, age: Duration) {
        let (pods, period) = (self.running(), self.config.volume_period.map(|period| period.min(age)));
        let Targets { files, trees, .. } = targets(pods.iter().map(|(pod, places)| (pod, places)), period);
        tokio::join!(self.survey_of_files.renew(files, PATIENCE), self.survey_of_trees.renew(trees, PATIENCE));
    }

    async fn cadvisor_page(self: Arc<Self>) -> (Instant, Bytes) {
        let (since, snapshot, is_partial) = match self.sample(Depth::Full).await {
            Ok((since, snapshot)) => (since, snapshot, false),
            Err(error) => {
                debug!(err = %error, "Failed to collect container statistics");
                (Instant::now(), Arc::default(), true)
            }
        };
        let (files, disks, images) =
            tokio::join!(self.open_files(&snapshot), self.disks(), self.images_of_sandboxes(&snapshot));
        let inner = self.clone();
        let written = self.writers.run_within(LIMIT, move || {
            let page = cadvisor_page::write(&cadvisor_page::CadvisorInputs {
                snapshot: &snapshot,
                now: wall(inner.deps.clock.now()),
                host: &inner.config.host,
                memory: host::memory(&inner.config.root),
                files: &files,
                mounted: &disks.mounted,
                devices: &disks.devices,
                sandbox_images: &images,
                is_partial,
            });
            Bytes::from(page)
        });
        (since, written.await.unwrap_or_default())
    }

    async fn open_files(self: &Arc<Self>, snapshot: &Arc<Snapshot>) -> Arc<Counts> {
        let (inner, snapshot) = (self.clone(), snapshot.clone());
        let count = || async move {
            let Some(mounts) = inner.mounts.clone() else { return Arc::default() };
            let proc = inner.config.root.join("proc");
            let before = inner.files.cached(Duration::MAX).unwrap_or_default();
            let count = move || open_files::count(&mounts, &proc, &open_files::members(&snapshot), &before);
            Arc::new(inner.walkers.run_within(LIMIT, count).await.unwrap_or_default())
        };
        self.files.recent(FILES_AGE, PATIENCE, count).await.unwrap_or_default()
    }

    async fn disks(self: &Arc<Self>) -> Arc<Disks> {
        let inner = self.clone();
        let query = || async move {
            let config = inner.config.clone();
            let walk = inner.walkers.run_within(LIMIT, move || {
                let own = config.root_directory.to_string_lossy();
                let hidden = [&*own, "/run/containerd", "/run/containers", "/var/run/netns", "/run/netns"];
                let reports_filesystems = config.reports_filesystems;
                let mounted =
                    if reports_filesystems { filesystems::mounted(&config.root, &hidden) } else { Vec::new() };
                Disks { mounted, devices: host::disks(&config.root) }
            });
            Arc::new(walk.await.unwrap_or_default())
        };
        self.disks.recent(DISKS_AGE, PATIENCE, query).await.unwrap_or_default()
    }

    /// Image of the sandboxes of each runtime handler, from one sandbox per handler.
    async fn images_of_sandboxes(&self, snapshot: &Snapshot) -> Arc<HashMap<String, String>> {
        let ready = snapshot.pods.iter().filter(|seen| seen.pod.is_ready);
        let handlers: HashMap<String, String> =
            ready.map(|seen| (seen.pod.handler.clone(), seen.pod.sandbox.to_string())).collect();
        if handlers.is_empty() {
            return Arc::default();
        }
        let runtime = self.deps.runtime.clone();
        let ask = || async move {
            let ask = |(handler, sandbox): (String, String)| {
                let runtime = runtime.clone();
                async move {
                    let info = timeout(LIMIT, runtime.pod_sandbox_info(&sandbox)).await.ok()?.ok()?;
                    Some((handler, runtime_report::sandbox_image(&info)))
                }
            };
            Arc::new(join_all(handlers.into_iter().map(ask)).await.into_iter().flatten().collect())
        };
        self.sandbox_images.recent(IMAGES_AGE, PATIENCE, ask).await.unwrap_or_default()
    }
}
