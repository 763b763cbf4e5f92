//! Puts eviction together with the rooms that it looks at and acts through.

mod history;
mod kernel;
mod page_cache;

use std::{
    collections::{BTreeSet, HashMap},
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use tokio::{
    sync::{mpsc, watch},
    task::spawn_blocking,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use self::{
    kernel::{Bell, UNIFIED, hear_group, hear_stalls, hear_usage},
    page_cache::PageCache,
};
use super::{
    build::{Base, BuildError, SETTLE},
    server_stats::StatsPages,
    settings,
    state_file::DiskStateFile,
};
use crate::{
    engine::{
        Command, EngineHandle, FatesView,
        allocation::Allocations,
        kill_and_wait,
        lifecycle::{StatusOverride, StopCause},
    },
    eviction::{
        EvictionConfig, Evictor, EvictorDeps, Picture, Watcher, WatcherDeps,
        message::Verdict,
        ports::{Gauges, Missing, Needs, Pods, Pressures, Reclaim},
        signals::{Condition, Devices, DiskReading, MemoryReading, Readings},
        usage::{ContainerUse, DiskUse, PodUse},
    },
    images,
    node::{Machine, max_pids},
    runtime::{GcMode, RuntimeManager},
};
use berth_config::{
    Loaded,
    eviction::{Signal, Threshold},
};
use berth_cri::ImageService;
use berth_metrics::EvictionMetrics;
use berth_ports::{NodeFacts, PodFates};
use berth_stats::{
    Form, Hands, MemorySeen, NodeLook, PodGroups, StatsProvider,
    disk::FileSystem,
    file_system,
    summary::{ContainerStats, FsStats, PodStats},
};
use berth_types::{Pod, PodUid};

/// How long one look at a file system, or at the kernel's files, may take.
const LOOK_LIMIT: Duration = Duration::from_secs(1);
/// How long the runtime may take to say where its images are.
const ASK_LIMIT: Duration = Duration::from_secs(5);
/// How often it is asked, before and after it has said so.
const ASK_AGAIN: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(60)];
/// What was measured of a disk longer ago does not say who filled it.
const MEASURED: Duration = Duration::from_secs(5);
/// How long the removal of what nobody needs may take.
const RECLAIM_LIMIT: Duration = Duration::from_secs(120);

/// What the watcher is made from.
pub(super) struct WatchParts<'a> {
    /// Facts of the machine.
    pub(super) machine: &'a Machine,
    /// The runtime's images.
    pub(super) images: Arc<dyn ImageService>,
    /// Names of control groups.
    pub(super) groups: Arc<dyn PodGroups>,
    /// Hears of pressures.
    pub(super) node: watch::Sender<Arc<NodeFacts>>,
}

/// How the node stands from now on, and what goes with it.
pub(super) struct Watched {
    config: Arc<EvictionConfig>,
    metrics: EvictionMetrics,
    pictures: watch::Receiver<Option<Arc<Picture>>>,
    began: Instant,
    groups: Arc<dyn PodGroups>,
}

/// Looks at the node from now on; returns after the first look, so that no pod is admitted to a node that is short.
///
/// # Errors
/// Thresholds that cannot be used.
pub(super) async fn watch(loaded: &Loaded, base: &Base, parts: WatchParts<'_>) -> Result<Watched, BuildError> {
    let config = Arc::new(settings::eviction(loaded)?);
    let (metrics, began) = (EvictionMetrics::new(&base.registry), Instant::now());
    let (places, bell) = (Arc::new(ImagePlaces::default()), Arc::new(Bell::default()));
    base.tasks.spawn(places.clone().follow(parts.images, bell.clone(), base.stop.child_token()));
    let (line, lines) = watch::channel(None);
    if loaded.config.kernel_memcg_notification {
        base.tasks.spawn(hear_usage(lines, bell.clone(), base.stop.child_token()));
    }
    if let Some(pods) = parts.groups.above().into_iter().next() {
        base.tasks.spawn(hear_group(pods, bell.clone(), base.stop.child_token()));
    }
    base.tasks.spawn(hear_stalls(bell.clone(), base.stop.child_token()));
    let look = NodeLook::new(parts.groups.clone(), base.clock.clone(), "/".into(), max_pids);
    let node = Arc::new(Disk::at(settings::root(loaded)));
    let (look, kernel) = (Arc::new(look), Hands::new(1));
    let gauges = Machinery { look, kernel, node, places, thresholds: config.thresholds.clone(), line };
    let file = Arc::new(DiskStateFile::new(settings::root(loaded).join("eviction_state")));
    let boot_id = &parts.machine.boot_id;
    let restored = history::restored(&*file, boot_id, base.clock.now()).await;
    let deps = WatcherDeps {
        gauges: Arc::new(gauges),
        alarm: bell,
        pressures: tell(parts.node),
        metrics: metrics.clone(),
        restored,
        pulse: base.pulses.of("eviction-watcher"),
    };
    let (watcher, mut pictures) = Watcher::new(config.clone(), deps, began);
    let keeper = history::Keeper { file, boot_id: boot_id.clone(), clock: base.clock.clone(), began };
    base.tasks.spawn(keeper.run(pictures.clone(), base.stop.child_token()));
    base.tasks.spawn(watcher.run(base.stop.child_token()));
    let _ = timeout(SETTLE, pictures.wait_for(Option::is_some)).await;
    Ok(Watched { config, metrics, pictures, began, groups: parts.groups })
}

/// What the evictor acts through.
pub(super) struct ActParts<'a> {
    /// The engine.
    pub(super) engine: &'a EngineHandle,
    /// What pods hold.
    pub(super) allocations: Allocations,
    /// What pods take.
    pub(super) statistics: &'a StatsPages,
    /// Removes dead containers.
    pub(super) runtime: Arc<RuntimeManager>,
    /// Removes images.
    pub(super) images: Arc<images::Manager>,
}

/// Evicts from now on.
pub(super) fn act(base: &Base, watched: Watched, parts: ActParts<'_>) {
    let Watched { config, metrics, pictures, began, groups } = watched;
    let engine = parts.engine;
    let pods = EnginePods {
        pods: engine.pods.clone(),
        fates: engine.fates.clone(),
        commands: engine.commands.clone(),
        allocations: parts.allocations,
        statistics: parts.statistics.provider(),
    };
    let reclaim = Removal {
        runtime: parts.runtime,
        images: parts.images,
        fates: Arc::new(engine.fates.clone()),
        page_cache: PageCache::new("/".into(), UNIFIED.into(), groups),
    };
    let deps = EvictorDeps {
        pods: Arc::new(pods),
        reclaim: Arc::new(reclaim),
        events: base.events.clone(),
        metrics,
        pulse: base.pulses.of("eviction"),
    };
    base.tasks.spawn(Evictor::new(config, deps, pictures, began).run(base.stop.child_token()));
}

/// Admission and the node's status read pressures among the facts of the node. What only an earlier agent has seen is for
/// the status alone: pods that run are admitted anew, and none of them may fail for what is over.
fn tell(node: watch::Sender<Arc<NodeFacts>>) -> Pressures {
    Arc::new(move |conditions: &BTreeSet<Condition>, restored: &BTreeSet<Condition>| {
        let names = |conditions: Vec<&Condition>| conditions.iter().map(|c| c.as_str().to_owned()).collect();
        let met: Vec<String> = names(conditions.difference(restored).collect());
        let restored: Vec<String> = names(conditions.intersection(restored).collect());
        node.send_if_modified(|facts| {
            let is_news = facts.pressures != met || facts.restored_pressures != restored;
            if is_news {
                let facts = Arc::make_mut(facts);
                (facts.pressures, facts.restored_pressures) = (met, restored);
            }
            is_news
        });
    })
}

/// A file system by a path on it. While a look at it hangs, there is no other.
struct Disk {
    path: PathBuf,
    is_busy: AtomicBool,
    /// As of the last look that showed something.
    device: Mutex<Option<u64>>,
    read: fn(&Path) -> io::Result<(u64, FileSystem)>,
}

impl Disk {
    fn at(path: PathBuf) -> Self {
        Self { path, is_busy: AtomicBool::new(false), device: Mutex::default(), read: file_system }
    }

    fn device(&self) -> Option<u64> {
        *self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn look(self: &Arc<Self>) -> Option<DiskReading> {
        if self.is_busy.swap(true, Ordering::AcqRel) {
            return None;
        }
        let own = self.clone();
        let looked = spawn_blocking(move || {
            let seen = (own.read)(&own.path);
            own.is_busy.store(false, Ordering::Release);
            seen
        });
        let (device, fs) = timeout(LOOK_LIMIT, looked).await.ok()?.ok()?.ok()?;
        *self.device.lock().unwrap_or_else(PoisonError::into_inner) = Some(device);
        Some(DiskReading {
            device,
            capacity: fs.capacity,
            available: fs.available,
            inodes: fs.inodes,
            inodes_free: fs.inodes_free,
        })
    }
}

/// Where the runtime keeps images and writable layers.
#[derive(Default)]
struct ImagePlaces {
    known: Mutex<[Option<Arc<Disk>>; 2]>,
}

impl ImagePlaces {
    /// Asks the runtime now and then: it may be started anew with other directories.
    async fn follow(self: Arc<Self>, images: Arc<dyn ImageService>, bell: Arc<Bell>, stop: CancellationToken) {
        loop {
            let asked = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                asked = timeout(ASK_LIMIT, images.image_fs_info()) => asked,
            };
            let [before, after] = ASK_AGAIN;
            let pause = match asked {
                Ok(Ok(info)) => {
                    let first = |all: &[berth_proto::cri::FilesystemUsage]| {
                        let path = all.first()?.fs_id.as_ref().map(|id| id.mountpoint.clone())?;
                        (!path.is_empty()).then_some(path)
                    };
                    match first(&info.image_filesystems) {
                        Some(images) => {
                            if self.set([Some(images), first(&info.container_filesystems)]) {
                                bell.ring();
                            }
                            after
                        }
                        // It does not know yet; where they were they still are.
                        None => before,
                    }
                }
                Ok(Err(_)) | Err(_) => before,
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = sleep(pause) => {}
            }
        }
    }

    /// Takes them in; says whether they are others than before. Where layers are may not be told for once: they are
    /// where they were, unless images have moved.
    fn set(&self, paths: [Option<String>; 2]) -> bool {
        let mut is_news = false;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        for (disk, path) in known.iter_mut().zip(paths) {
            let path = path.map(PathBuf::from);
            if (path.is_none() && !is_news) || disk.as_ref().map(|disk| &disk.path) == path.as_ref() {
                continue;
            }
            *disk = path.map(|path| Arc::new(Disk::at(path)));
            is_news = true;
        }
        is_news
    }

    fn known(&self) -> [Option<Arc<Disk>>; 2] {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Looks at this machine.
struct Machinery {
    look: Arc<NodeLook>,
    /// While a look at the kernel's files hangs, there is no other.
    kernel: Hands,
    node: Arc<Disk>,
    places: Arc<ImagePlaces>,
    thresholds: Vec<Threshold>,
    /// Use of memory from which on the machine is short of it.
    line: watch::Sender<Option<u64>>,
}

#[async_trait]
impl Gauges for Machinery {
    async fn look(&self) -> Readings {
        async fn disk(disk: Option<Arc<Disk>>) -> Option<DiskReading> {
            disk?.look().await
        }
        let [images, layers] = self.places.known();
        let look = self.look.clone();
        let device = |disk: Option<&Arc<Disk>>| disk.and_then(|disk| disk.device());
        let kernel = self.kernel.work(LOOK_LIMIT, move || look.look());
        let (seen, node_fs, image_fs, container_fs) =
            tokio::join!(kernel, self.node.look(), disk(images.clone()), disk(layers.clone()));
        let seen = seen.unwrap_or_default();
        let (node, images, containers) = (self.node.device(), device(images.as_ref()), device(layers.as_ref()));
        self.line.send_replace(seen.memory.and_then(|seen| usage_line(&self.thresholds, seen)));
        let memory = |seen: MemorySeen| MemoryReading { total: seen.total, working_set: seen.working_set };
        Readings {
            memory: seen.memory.map(memory),
            pods_memory: seen.pods.map(memory),
            node_fs,
            image_fs,
            container_fs,
            processes: seen.processes.and_then(|processes| Some((processes.max?, processes.now))),
            devices: Devices { node, images, containers },
            ..Readings::default()
        }
    }
}

/// The use of memory, page cache included, at which the first threshold is met.
fn usage_line(thresholds: &[Threshold], seen: MemorySeen) -> Option<u64> {
    let of_memory = thresholds.iter().filter(|threshold| threshold.signal == Signal::Memory);
    let capacity = i64::try_from(seen.total).ok()?;
    let bound = of_memory.map(|threshold| threshold.below.of(capacity).value()).max()?;
    let cache = seen.usage.saturating_sub(seen.working_set);
    Some(seen.total.saturating_sub(u64::try_from(bound).ok()?).saturating_add(cache))
}

/// The pods as the engine drives them.
struct EnginePods {
    pods: watch::Receiver<Arc<Vec<Arc<Pod>>>>,
    fates: FatesView,
    commands: mpsc::Sender<Command>,
    allocations: Allocations,
    statistics: StatsProvider,
}

#[async_trait]
impl Pods for EnginePods {
    fn active(&self) -> Vec<Arc<Pod>> {
        let pods = self.pods.borrow().clone();
        let active = pods.iter().filter(|pod| self.fates.is_active(pod.uid()));
        active.map(|pod| self.allocations.allocated(pod)).collect()
    }

    async fn usages(&self, needs: Needs) -> Result<HashMap<PodUid, PodUse>, String> {
        let summary = match needs {
            Needs::Memory => self.statistics.values(Form::Short).await,
            Needs::Processes => {
                let counts = self.statistics.processes().await?;
                let only = |(pod, processes)| (pod, PodUse { processes, ..PodUse::default() });
                return Ok(counts.into_iter().map(only).collect());
            }
            Needs::Disks => self.statistics.values(Form::Full).await,
            Needs::DisksNow => self.statistics.values_now(MEASURED).await,
        }?;
        Ok(summary.pods.iter().map(|pod| (pod.id.uid.clone(), usage(pod))).collect())
    }

    async fn evict(&self, pod: &Arc<Pod>, verdict: &Verdict) -> Result<(), String> {
        let message = verdict.message.clone();
        let disruption = verdict.is_disruption.then(|| ("TerminationByKubelet".to_owned(), message.clone()));
        let reason = "Evicted".to_owned();
        let status = StatusOverride {
            reason,
            message,
            disruption,
            keeps_success: false,
            is_unready: false,
            words: Duration::ZERO,
        };
        kill_and_wait(&self.commands, pod, StopCause::Evicted, Some(verdict.grace), Some(status)).await
    }

    async fn gone(&self, pod: &PodUid) {
        self.fates.finished(pod).await;
    }
}

fn usage(pod: &PodStats) -> PodUse {
    let disk = |fs: &FsStats| Some(DiskUse { bytes: fs.used?, inodes: fs.inodes_used.unwrap_or_default() });
    let container = |container: &ContainerStats| ContainerUse {
        name: container.name.clone(),
        memory: container.usage.memory.and_then(|memory| memory.working_set),
        rootfs: container.rootfs.as_ref().and_then(disk),
        logs: container.logs.as_ref().and_then(disk),
    };
    PodUse {
        memory: pod.usage.memory.and_then(|memory| memory.working_set),
        processes: pod.processes,
        storage: pod.ephemeral_storage.and_then(|storage| storage.used),
        volumes: pod.volumes.iter().filter_map(|volume| Some((volume.name.clone(), disk(&volume.fs)?))).collect(),
        containers: pod.containers.iter().map(container).collect(),
    }
}

/// Removes what nobody needs.
struct Removal {
    runtime: Arc<RuntimeManager>,
    images: Arc<images::Manager>,
    fates: Arc<dyn PodFates>,
    page_cache: PageCache,
}

#[async_trait]
impl Reclaim for Removal {
    async fn containers(&self) -> Result<(), String> {
        let collected = self.runtime.collect_garbage(&self.fates, GcMode::EvictTerminated);
        timeout(RECLAIM_LIMIT, collected).await.unwrap_or_else(|_| Err(late("dead containers")))
    }

    async fn images(&self) -> Result<(), String> {
        match timeout(RECLAIM_LIMIT, self.images.delete_unused()).await {
            Ok(deleted) => deleted.map(drop).map_err(|error| error.to_string()),
            Err(_) => Err(late("unused images")),
        }
    }

    async fn page_cache(&self, worst: &PodUid, missing: Missing) -> bool {
        self.page_cache.take_back(worst, missing).await
    }
}

fn late(what: &str) -> String {
    format!("{what} were not removed within {RECLAIM_LIMIT:?}")
}

#[cfg(test)]
mod tests {
    use std::collections::{HashSet, VecDeque};

    use serde_json::json;

    use super::*;
    use crate::engine::admission::{AdmissionRules, AdmitInput, Purpose, admit};
    use berth_cri::CriResult;
    use berth_metrics::Registry;
    use berth_ports::Pulse;
    use berth_proto::cri;

    #[test]
    fn pressures_are_facts_of_the_node() {
        let (node, mut facts) = watch::channel(Arc::<NodeFacts>::default());
        let tell = tell(node);
        let none = BTreeSet::new();
        tell(&none, &none);
        assert!(!facts.has_changed().expect("open"), "no news");
        tell(&[Condition::Disk, Condition::Memory].into(), &none);
        assert_eq!(facts.borrow_and_update().pressures, ["MemoryPressure", "DiskPressure"]);
        tell(&[Condition::Disk, Condition::Memory].into(), &none);
        assert!(!facts.has_changed().expect("open"));
        tell(&[Condition::Disk, Condition::Memory].into(), &[Condition::Disk].into());
        let seen = facts.borrow_and_update().clone();
        assert_eq!(
            (&*seen.pressures, &*seen.restored_pressures),
            (&["MemoryPressure".to_owned()][..], &["DiskPressure".to_owned()][..])
        );
        tell(&none, &none);
        assert!(facts.borrow().pressures.is_empty() && facts.borrow().restored_pressures.is_empty());
    }

    /// Sees that all is well.
    struct Well;

    #[async_trait]
    impl Gauges for Well {
        async fn look(&self) -> Readings {
            Readings::default()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_survives_a_restart_under_a_pressure_that_is_over() {
        let (node, mut facts) = watch::channel(Arc::<NodeFacts>::default());
        let config = EvictionConfig {
            thresholds: Vec::new(),
            transition: Duration::from_secs(300),
            max_pod_grace: 0,
            local_storage: true,
        };
        let deps = WatcherDeps {
            gauges: Arc::new(Well),
            alarm: Arc::new(Bell::default()),
            pressures: tell(node),
            metrics: EvictionMetrics::new(&Registry::new()),
            restored: vec![(Condition::Disk, Duration::from_secs(60))],
            pulse: Pulse::default(),
        };
        let (watcher, _pictures) = Watcher::new(Arc::new(config), deps, Instant::now());
        let stop = CancellationToken::new();
        let watching = tokio::spawn(watcher.run(stop.clone()));
        let reported = facts.wait_for(|facts| facts.restored_pressures == ["DiskPressure"]).await;
        let seen = reported.expect("it is reported").clone();
        let object = json!({"metadata": {"name": "web", "namespace": "n", "uid": "u"}, "spec": {"containers": []}});
        let pod = Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"));
        for purpose in [Purpose::New, Purpose::Restored] {
            let (rejected, rules) = (HashSet::new(), AdmissionRules::default());
            let input = AdmitInput { pod: &pod, purpose, active: &[], rejected: &rejected, node: &seen, rules: &rules };
            let refusal = admit(&input).err();
            assert!(refusal.as_ref().is_none_or(|refusal| refusal.reason != "Evicted"), "{refusal:?}");
        }
        stop.cancel();
        watching.await.expect("ends");
    }

    #[test]
    fn the_line_is_where_the_first_threshold_is_met() {
        let config = |below: &str| {
            let mut config = berth_config::defaults::defaults();
            config.eviction_hard = [("memory.available".to_owned(), below.to_owned())].into();
            berth_config::eviction::thresholds(&config).expect("usable")
        };
        let seen = MemorySeen { total: 1000, usage: 500, working_set: 300 };
        assert_eq!(usage_line(&config("100"), seen), Some(1100), "200 of page cache do not count");
        assert_eq!(usage_line(&config("10%"), seen), Some(1100));
        assert_eq!(usage_line(&[], seen), None);
    }

    /// As a file system whose server is gone; only the first look waits for it.
    #[tokio::test]
    async fn a_disk_that_hangs_holds_up_one_look_and_no_other_disk() {
        fn dead(_: &Path) -> io::Result<(u64, FileSystem)> {
            let (kept, never) = std::sync::mpsc::channel::<()>();
            let _ = never.recv_timeout(LOOK_LIMIT * 3); // nobody sends
            drop(kept);
            Err(io::ErrorKind::TimedOut.into())
        }
        let hung = Arc::new(Disk { read: dead, ..Disk::at("/".into()) });
        let well = Arc::new(Disk::at("/".into()));
        assert!(hung.look().await.is_none());
        // Another look would have to wait as long.
        let again = timeout(LOOK_LIMIT / 2, async { (hung.look().await, well.look().await) }).await;
        let (hung, well) = again.expect("nobody waits for what hangs");
        assert!(hung.is_none() && well.is_some());
    }

    #[tokio::test]
    async fn a_disk_is_looked_at_and_one_that_is_not_there_is_absent() {
        let dir = tempfile::tempdir().expect("a folder");
        let disk = Arc::new(Disk::at(dir.path().to_owned()));
        assert!(disk.look().await.is_some_and(|seen| seen.capacity > 0));
        let device = disk.device();
        disk.is_busy.store(true, Ordering::Release);
        assert_eq!(disk.look().await, None, "a look hangs");
        assert!(device.is_some() && disk.device() == device, "it has not moved");
        assert_eq!(Arc::new(Disk::at("/no/such/place".into())).look().await, None);
    }

    /// Says where images and layers are: that first, and so on.
    struct Runtime {
        answers: Mutex<VecDeque<cri::ImageFsInfoResponse>>,
        asked: Mutex<Vec<Instant>>,
    }

    #[async_trait]
    impl ImageService for Runtime {
        async fn list_images(&self) -> CriResult<Vec<cri::Image>> {
            unreachable!("nobody asks")
        }
        async fn image_status(&self, _: cri::ImageSpec) -> CriResult<Option<cri::Image>> {
            unreachable!("nobody asks")
        }
        async fn pull_image(
            &self,
            _: cri::ImageSpec,
            _: Option<cri::AuthConfig>,
            _: Option<cri::PodSandboxConfig>,
        ) -> CriResult<String> {
            unreachable!("nobody asks")
        }
        async fn remove_image(&self, _: cri::ImageSpec) -> CriResult<()> {
            unreachable!("nobody asks")
        }
        async fn image_fs_info(&self) -> CriResult<cri::ImageFsInfoResponse> {
            self.asked.lock().expect("whole").push(Instant::now());
            Ok(self.answers.lock().expect("whole").pop_front().unwrap_or_default())
        }
    }

    fn told((images, layers): (&[&str], &[&str])) -> cri::ImageFsInfoResponse {
        let usage = |path: &&str| {
            let id = cri::FilesystemIdentifier { mountpoint: (*path).to_owned() };
            cri::FilesystemUsage { fs_id: Some(id), ..Default::default() }
        };
        cri::ImageFsInfoResponse {
            image_filesystems: images.iter().map(usage).collect(),
            container_filesystems: layers.iter().map(usage).collect(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn images_and_layers_are_where_they_were_while_that_is_not_told() {
        let answers = [(&["/a"][..], &["/b"][..]), (&[], &[]), (&["/a"], &[]), (&["/c"], &[])];
        let answers = Mutex::new(answers.map(told).into());
        let runtime = Arc::new(Runtime { answers, asked: Mutex::default() });
        let (places, began, stop) = (Arc::new(ImagePlaces::default()), Instant::now(), CancellationToken::new());
        let following = tokio::spawn(places.clone().follow(runtime.clone(), Arc::default(), stop.clone()));
        let disks = || places.known().map(|disk| disk.expect("told"));
        sleep(Duration::from_secs(1)).await;
        let [images, layers] = disks();
        assert_eq!((&*images.path, &*layers.path), (Path::new("/a"), Path::new("/b")));
        for (seconds, told) in [(60, "nothing"), (2, "where images are")] {
            sleep(Duration::from_secs(seconds)).await;
            let [same_images, same_layers] = disks();
            assert!(Arc::ptr_eq(&images, &same_images) && Arc::ptr_eq(&layers, &same_layers), "{told}");
        }
        sleep(Duration::from_secs(60)).await;
        let [images, layers] = places.known();
        assert_eq!(images.map(|disk| disk.path.clone()), Some("/c".into()));
        assert!(layers.is_none(), "they are not known to be elsewhere");
        let asked = runtime.asked.lock().expect("whole").clone();
        let asked: Vec<u64> = asked.iter().map(|at| at.duration_since(began).as_secs()).collect();
        assert_eq!(asked, [0, 60, 62, 122], "soon again where nothing was told");
        stop.cancel();
        following.await.expect("ends");
    }
}
