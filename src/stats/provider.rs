//! Puts readings and pages together, and remembers them for a second.
//!
//! A page is made when somebody asks and the last one is older than [`MEMO`]; who asks meanwhile
//! gets the same bytes. The three pages share one reading where it is young and deep enough. What
//! the runtime tells of writable layers is at most [`RUNTIME_AGE`] old while somebody asks, open
//! files [`FILES_AGE`], logs [`LOGS_AGE`], volumes `volumeStatsAggPeriod`. Behaviour: spec 04b §7-11.

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
    cadvisor_page::{self, Mounted, OpenFiles},
    disk::FileSystem,
    encoded::{Compressed, Encoded},
    filesystems,
    hands::Hands,
    host::{self, DiskCounters, Host},
    memo::Memo,
    mounts::Mounts,
    open_files,
    pods::{ShownPod, shown},
    reader::{PodGroups, Reader},
    reading::Depth,
    resource_page, runtime_report,
    snapshot::{Sampler, Snapshot, wall},
    summarise,
    summary::{Form, PodPlaces, RuntimeReport, Summary},
    summary_json,
    survey::{How, Measurements, Survey, Surveyors, Target},
    system_groups::SystemGroups,
};
use crate::{
    cri::{ImageService, RuntimeService},
    engine::ports::{Clock, PodObserver},
    metrics::{StatsMetrics, exposition::Format},
    pod::{PodRef, PodUid, hash::fnv1a_64},
    sys::mount_table,
};

/// How old a page, or the reading behind it, may be.
pub const MEMO: Duration = Duration::from_secs(1);
/// How old what the runtime tells may become before it is asked again.
pub const RUNTIME_AGE: Duration = Duration::from_secs(10);
/// How old the count of open files may become.
pub const FILES_AGE: Duration = Duration::from_secs(30);
/// How old the sizes of logs may become.
pub const LOGS_AGE: Duration = Duration::from_secs(10);
/// How old the sizes of hosts files may become.
const HOSTS_AGE: Duration = Duration::from_secs(60);
/// How old the sizes of file systems may become on the page of metrics.
const DISKS_AGE: Duration = Duration::from_secs(10);
/// How old the images of sandboxes may become.
const IMAGES_AGE: Duration = Duration::from_secs(600);
/// How long a page waits for something that has never been told yet.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long one reading may take, and anything else that blocks.
const LIMIT: Duration = Duration::from_secs(10);
/// How long control files stay open that nobody asks for.
const IDLE: Duration = Duration::from_secs(120);
/// How long a page is kept that nobody asks for any more.
const KEEP: Duration = Duration::from_secs(5);
/// How long anything else is.
const KEEP_LONG: Duration = Duration::from_secs(1800);

/// Directories of a pod on the node's disk.
pub trait PodDirectories: Send + Sync + 'static {
    /// Where the directories of a pod are.
    fn of(&self, pod: &PodRef) -> PodPlaces;
}

/// What the provider is told.
#[derive(Clone, Debug, Default)]
pub struct StatsConfig {
    /// The node's name.
    pub node_name: String,
    /// `/`.
    pub root: PathBuf,
    /// The agent's root directory: its file system is the node's.
    pub root_directory: PathBuf,
    /// `volumeStatsAggPeriod`; `None` where volumes are not measured.
    pub volume_period: Option<Duration>,
    /// `kubeletCgroups`; empty for the group this process is in.
    pub kubelet_group: String,
    /// `--runtime-cgroups`; empty for the group of the runtime's process.
    pub runtime_group: String,
    /// `systemCgroups`.
    pub system_group: String,
    /// Name of the runtime's process.
    pub runtime_process: String,
    /// Whether file systems are told of on the page of metrics (`localStorageCapacityIsolation`).
    pub tells_filesystems: bool,
    /// Control files that may stay open.
    pub max_open: usize,
    /// Facts of the machine.
    pub host: Host,
}

/// Whom the provider asks.
pub struct StatsDeps {
    /// What runs.
    pub observer: Arc<dyn PodObserver>,
    /// Writable layers.
    pub runtime: Arc<dyn RuntimeService>,
    /// Images.
    pub images: Arc<dyn ImageService>,
    /// Names of control groups.
    pub groups: Arc<dyn PodGroups>,
    /// Directories of pods.
    pub directories: Arc<dyn PodDirectories>,
    /// Wall time.
    pub clock: Arc<dyn Clock>,
    /// What is counted.
    pub metrics: StatsMetrics,
}

type Page = Result<Bytes, String>;
type Sampled = Result<Arc<Snapshot>, String>;

/// The pages of metrics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MetricsPage {
    /// `/metrics/resource`
    Resource,
    /// `/metrics/cadvisor`
    Cadvisor,
}

/// Makes the pages of statistics.
pub struct StatsProvider {
    inner: Arc<Inner>,
}

struct Inner {
    config: StatsConfig,
    deps: StatsDeps,
    mounts: Option<Mounts>,
    sampler: Option<Arc<Mutex<Sampler>>>,
    system: SystemGroups,
    survey_of_files: Survey,
    survey_of_trees: Survey,
    last_reading: Mutex<Option<Instant>>,
    samples: [Memo<Sampled>; 3],
    full: Memo<Page>,
    short: Memo<Page>,
    resource: Memo<Bytes>,
    cadvisor: Memo<Bytes>,
    resource_forms: Encoded,
    cadvisor_forms: Encoded,
    report: Memo<Arc<RuntimeReport>>,
    root_fs: Memo<Option<FileSystem>>,
    files: Memo<Arc<HashMap<String, OpenFiles>>>,
    disks: Memo<Arc<Disks>>,
    sandbox_images: Memo<Arc<HashMap<String, String>>>,
    readers: Hands,
    walkers: Hands,
    writers: Hands,
}

/// File systems and block devices.
#[derive(Default)]
struct Disks {
    mounted: Vec<Mounted>,
    devices: HashMap<(u32, u32), DiskCounters>,
}

impl StatsProvider {
    /// The provider, and what measures directories, which the caller must run.
    pub fn new(config: StatsConfig, deps: StatsDeps) -> (Self, Surveyors) {
        let mounts = mount_table::read().ok().and_then(|table| Mounts::find(&table));
        let sampler = mounts.clone().map(|mounts| {
            let reader = Reader::new(mounts, deps.groups.clone(), config.max_open);
            let (clock, root) = (deps.clock.clone(), config.root.clone());
            Arc::new(Mutex::new(Sampler::new(reader, deps.groups.clone(), clock, root, config.host.max_pids)))
        });
        let (files, of_files) = Survey::new(deps.clock.clone());
        let (trees, of_trees) = Survey::new(deps.clock.clone());
        let inner = Inner {
            mounts,
            sampler,
            system: SystemGroups::new(&config, deps.groups.above().into_iter().next()),
            survey_of_files: files,
            survey_of_trees: trees,
            last_reading: Mutex::default(),
            samples: [Memo::new(KEEP), Memo::new(KEEP), Memo::new(KEEP)],
            full: Memo::new(KEEP),
            short: Memo::new(KEEP),
            resource: Memo::new(KEEP),
            cadvisor: Memo::new(KEEP),
            resource_forms: Encoded::new(KEEP),
            cadvisor_forms: Encoded::new(KEEP),
            report: Memo::new(KEEP_LONG),
            root_fs: Memo::new(KEEP_LONG),
            files: Memo::new(KEEP_LONG),
            disks: Memo::new(KEEP_LONG),
            sandbox_images: Memo::new(KEEP_LONG),
            readers: Hands::new(4),
            walkers: Hands::new(4),
            writers: Hands::new(4),
            config,
            deps,
        };
        (Self { inner: Arc::new(inner) }, Surveyors(vec![of_files, of_trees]))
    }

    /// The document of `/stats/summary`.
    ///
    /// # Errors
    /// What could not be read without which there is no summary; the text behind `Internal Error: `.
    pub async fn summary(&self, form: Form) -> Result<Bytes, String> {
        let memo = match form {
            Form::Full => &self.inner.full,
            Form::Short => &self.inner.short,
        };
        let inner = self.inner.clone();
        let page = memo.fresh(MEMO, || async move {
            let summary = inner.clone().summarise(form).await?;
            let written = inner.writers.work(LIMIT, move || Bytes::from(summary_json::write(&summary))).await;
            written.ok_or_else(|| "the summary could not be written in time".to_owned())
        });
        page.await.unwrap_or_else(|| Err(FAILED.to_owned()))
    }

    /// A page of metrics in the form a scraper asks for.
    pub async fn metrics(&self, page: MetricsPage, format: Format, compressed: Compressed) -> Bytes {
        let (plain, forms) = match page {
            MetricsPage::Resource => (self.resource_metrics().await, &self.inner.resource_forms),
            MetricsPage::Cadvisor => (self.cadvisor_metrics().await, &self.inner.cadvisor_forms),
        };
        forms.of(plain, format, compressed, &self.inner.writers).await
    }

    /// The page of `/metrics/resource`; a failure is told on the page.
    pub async fn resource_metrics(&self) -> Bytes {
        let inner = self.inner.clone();
        let page = self.inner.resource.fresh(MEMO, || async move {
            let summary = inner.short_of(Depth::Core).await;
            if let Err(error) = &summary {
                debug!(err = %error, "Error getting summary for resourceMetric prometheus endpoint");
            }
            resource_page::write(summary.as_ref().map_err(String::as_str)).into()
        });
        page.await.unwrap_or_else(|| resource_page::write(Err(FAILED)).into())
    }

    /// The page of `/metrics/cadvisor`; a failure is told on the page.
    pub async fn cadvisor_metrics(&self) -> Bytes {
        let inner = self.inner.clone();
        let page = self.inner.cadvisor.fresh(MEMO, || async move { inner.cadvisor_page().await });
        page.await.unwrap_or_default()
    }
}

/// Who asks for what panicked is told so.
const FAILED: &str = "the statistics could not be made";

impl Inner {
    /// A reading that is deep enough and no older than [`MEMO`].
    async fn sample(self: &Arc<Self>, depth: Depth) -> Sampled {
        let [core, summary, full] = &self.samples;
        let (own, deeper): (_, &[_]) = match depth {
            Depth::Core => (core, &[summary, full]),
            Depth::Summary => (summary, &[full]),
            Depth::Full => (full, &[]),
        };
        for memo in deeper {
            if let Some(young) = memo.young(MEMO) {
                return young;
            }
        }
        let inner = self.clone();
        own.fresh(MEMO, || async move { inner.read(depth).await }).await.unwrap_or_else(|| Err(FAILED.to_owned()))
    }

    async fn read(self: Arc<Self>, depth: Depth) -> Sampled {
        let pods = self.pods().await?;
        let sampler = self.sampler.clone().ok_or("failed to get root cgroup stats: no control groups are mounted")?;
        let (began, inner) = (Instant::now(), self.clone());
        let read = self.readers.work(LIMIT, move || {
            let system = inner.system.all();
            sampler.lock().unwrap_or_else(PoisonError::into_inner).sample(pods, system, depth)
        });
        let snapshot = read.await.ok_or("failed to get root cgroup stats: control groups could not be read in time")?;
        self.deps.metrics.read(began.elapsed(), snapshot.size.0);
        self.close_later();
        Ok(Arc::new(snapshot))
    }

    /// Closes the control files once nobody has asked for a while; one task at a time waits for that.
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
                inner.readers.work(LIMIT, close).await;
            }
        });
    }

    async fn pods(&self) -> Result<Vec<ShownPod>, String> {
        let known = match self.deps.observer.known() {
            Some(known) => known,
            None => match timeout(LIMIT, self.deps.observer.list()).await {
                Ok(listed) => listed.map_err(|error| format!("failed to list pod stats: {error}"))?,
                Err(_) => return Err("failed to list pod stats: the runtime does not answer".to_owned()),
            },
        };
        Ok(shown(known.pods.values()))
    }

    async fn summarise(self: Arc<Self>, form: Form) -> Result<Summary, String> {
        if form == Form::Short {
            return self.short_of(Depth::Summary).await;
        }
        let (snapshot, report, root_fs) =
            tokio::join!(self.sample(Depth::Summary), self.report(), self.root_filesystem());
        let snapshot = snapshot?;
        let places = self.places(&snapshot);
        let measured = self.measured(&snapshot, &places).await;
        summarise::build(&summarise::Inputs {
            form,
            node: &self.config.node_name,
            booted_at: self.config.host.booted_at,
            snapshot: &snapshot,
            runtime: report.as_deref(),
            measured: &measured,
            places: &places,
            root_fs,
        })
    }

    /// Processor, memory and swap. The runtime is asked only where a group cannot be read.
    async fn short_of(self: &Arc<Self>, depth: Depth) -> Result<Summary, String> {
        let snapshot = self.sample(depth).await?;
        let is_missing = snapshot.pods.iter().any(|pod| pod.containers.iter().any(Option::is_none));
        let report = if is_missing { self.report().await } else { None };
        summarise::build(&summarise::Inputs {
            form: Form::Short,
            node: &self.config.node_name,
            booted_at: self.config.host.booted_at,
            snapshot: &snapshot,
            runtime: report.as_deref(),
            measured: &HashMap::new(),
            places: &HashMap::new(),
            root_fs: None,
        })
    }

    async fn report(&self) -> Option<Arc<RuntimeReport>> {
        let (runtime, images) = (self.deps.runtime.clone(), self.deps.images.clone());
        self.report.recent(RUNTIME_AGE, PATIENCE, || runtime_report::ask(runtime, images)).await
    }

    async fn root_filesystem(self: &Arc<Self>) -> Option<FileSystem> {
        let inner = self.clone();
        let ask = || async move {
            let path = inner.config.root_directory.clone();
            inner.walkers.work(LIMIT, move || FileSystem::of(&path).ok()).await.flatten()
        };
        self.root_fs.recent(MEMO, PATIENCE, ask).await.flatten()
    }

    fn places(&self, snapshot: &Snapshot) -> HashMap<PodUid, PodPlaces> {
        let running = snapshot.pods.iter().filter(|seen| !seen.pod.containers.is_empty());
        running.map(|seen| (seen.pod.id.uid.clone(), self.deps.directories.of(&seen.pod.id))).collect()
    }

    async fn measured(&self, snapshot: &Snapshot, places: &HashMap<PodUid, PodPlaces>) -> Measurements {
        let (mut targets, mut trees) = (Vec::new(), Vec::new());
        for seen in &snapshot.pods {
            let Some(places) = places.get(&seen.pod.id.uid) else { continue };
            let target = |path: PathBuf, how, period| Target { path, how, period };
            targets.push(target(places.logs.clone(), How::Files, LOGS_AGE));
            let names = seen.pod.containers.iter().map(|container| places.logs.join(&*container.name));
            targets.extend(names.map(|path| target(path, How::Files, LOGS_AGE)));
            targets.extend(places.etc_hosts.iter().map(|path| target(path.clone(), How::File, HOSTS_AGE)));
            if let Some(period) = self.config.volume_period {
                let period = spread(period, &seen.pod.id.uid);
                trees.extend(places.volumes.iter().map(|volume| target(volume.path.clone(), How::Tree, period)));
            }
        }
        let (files, trees) =
            tokio::join!(self.survey_of_files.known(targets, PATIENCE), self.survey_of_trees.known(trees, PATIENCE));
        let all = files.iter().chain(trees.iter());
        Arc::new(all.map(|(path, measured)| (path.clone(), *measured)).collect())
    }

    async fn cadvisor_page(self: Arc<Self>) -> Bytes {
        let snapshot = self.sample(Depth::Full).await;
        let (snapshot, is_partial) = match snapshot {
            Ok(snapshot) => (snapshot, false),
            Err(error) => {
                debug!(err = %error, "Failed to collect container statistics");
                (Arc::default(), true)
            }
        };
        let (files, disks, images) =
            tokio::join!(self.open_files(&snapshot), self.disks(), self.images_of_sandboxes(&snapshot));
        let inner = self.clone();
        let written = self.writers.work(LIMIT, move || {
            let page = cadvisor_page::write(&cadvisor_page::Inputs {
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
        written.await.unwrap_or_default()
    }

    async fn open_files(self: &Arc<Self>, snapshot: &Arc<Snapshot>) -> Arc<HashMap<String, OpenFiles>> {
        let (inner, snapshot) = (self.clone(), snapshot.clone());
        let count = || async move {
            let Some(mounts) = inner.mounts.clone() else { return Arc::default() };
            let proc = inner.config.root.join("proc");
            let counted = inner
                .walkers
                .work(LIMIT, move || open_files::count(&mounts, &proc, &open_files::members(&snapshot)))
                .await;
            Arc::new(counted.unwrap_or_default())
        };
        self.files.recent(FILES_AGE, PATIENCE, count).await.unwrap_or_default()
    }

    async fn disks(self: &Arc<Self>) -> Arc<Disks> {
        let inner = self.clone();
        let look = || async move {
            let config = inner.config.clone();
            let looked = inner.walkers.work(LIMIT, move || {
                let own = config.root_directory.to_string_lossy();
                let hidden = [&*own, "/run/containerd", "/run/containers", "/var/run/netns", "/run/netns"];
                let tells = config.tells_filesystems;
                let mounted = if tells { filesystems::mounted(&config.root, &hidden) } else { Vec::new() };
                Disks { mounted, devices: host::disks(&config.root) }
            });
            Arc::new(looked.await.unwrap_or_default())
        };
        self.disks.recent(DISKS_AGE, PATIENCE, look).await.unwrap_or_default()
    }

    /// One sandbox of each handler is asked for its image.
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

/// Periods differ from pod to pod, between once and twice as long, so that not all are measured at the same time.
fn spread(period: Duration, pod: &PodUid) -> Duration {
    let share = u32::try_from(fnv1a_64(pod.as_str().as_bytes()) % 1000).unwrap_or_default();
    period.saturating_add(period.saturating_mul(share) / 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn periods_are_spread() {
        let minute = Duration::from_secs(60);
        let periods: Vec<Duration> = (0..50).map(|n| spread(minute, &format!("uid-{n}").into())).collect();
        assert!(periods.iter().all(|period| (minute..2 * minute).contains(period)), "{periods:?}");
        assert!(periods.iter().any(|period| *period < minute * 5 / 4) && periods.iter().any(|p| *p > minute * 7 / 4));
    }
}
