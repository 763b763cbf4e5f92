//! In-process agent over the scripted CRI: real mux, engine, runtime, images, PLEG, and status manager.
//!
//! Runs on tokio's clock, which tests may pause. A [`Machine`] is what outlives the agent: runtime, disk, state
//! files. An [`Agent`] is one run of it: start it, submit sets of pods, stop it, or kill it.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use berth::{
    engine::{
        self, EngineConfig, EngineHandle, SourceReadiness, SyncLoopCommand, SyncLoopInputs, WorkerContext, WorkerView,
        allocation::{Allocator, AllocatorDeps},
    },
    images,
    pleg::{self, ContainerDied, CriEvents, Pleg, PlegConfig, PlegDeps},
    runtime::{ActuatedStore, RuntimeCheck, RuntimeConfig, RuntimeDeps, RuntimeManager},
    sources::{Mux, SourceSender, SourceSet},
};
use berth_metrics::{
    AdmissionMetrics, AllocationMetrics, EngineMetrics, PlegMetrics, Registry, RuntimeMetrics, SourceMetrics,
    StatusMetrics,
};
use berth_ports::{
    Clock, EnsureImage, ImageProvider, NoClaims, NoDevices, NodeFacts, PodDevices, PodObserver, PodProgress,
    PodRuntime, PodStateProvider, PullPolicy,
};
use berth_status::StatusManager;
use berth_types::{Pod, PodSource, PodUid, api};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    clock::TokioClock,
    kill_switch::{KillPoint, KillSwitch},
    pods::simple,
    port_fakes::{
        Disk, MemoryFile, MirrorPodRecorder, NoApi, NoLogs, PlainRequests, Probes, Recorder, RuntimeMessages,
    },
    scripted_cri::ScriptedCri,
};

/// Configuration of an agent.
#[derive(Clone)]
pub struct Setup {
    /// Pod sources to register.
    pub sources: Vec<PodSource>,
    /// Crash back-off: initial delay and maximum.
    pub backoff: (Duration, Duration),
    /// Whether the registry credentials of the node, which are files, are read at the start instead of with the first
    /// pull, so that no other task waits for file I/O.
    pub reads_logins: bool,
    /// Name, capacity, and allocatable of the node.
    pub node: NodeFacts,
    /// Device manager at admission; by default there are no devices.
    pub devices: Arc<dyn PodDevices>,
}

impl Default for Setup {
    fn default() -> Self {
        let quantities = || {
            let amounts = [("cpu", "4"), ("memory", "8Gi"), ("pods", "110"), ("ephemeral-storage", "100Gi")];
            amounts.map(|(name, amount)| (name.to_owned(), amount.to_owned())).into()
        };
        let node = NodeFacts {
            name: "node".to_owned(),
            hostname: "node".to_owned(),
            capacity: quantities(),
            allocatable: quantities(),
            ..NodeFacts::default()
        };
        Self {
            sources: vec![PodSource::File, PodSource::Api],
            backoff: (Duration::from_secs(10), Duration::from_secs(300)),
            reads_logins: false,
            node,
            devices: Arc::new(NoDevices),
        }
    }
}

/// State that outlives the agent: runtime, clock, disk, and state files.
pub struct Machine {
    /// Scripted CRI runtime.
    pub cri: Arc<ScriptedCri>,
    /// Wall clock that follows tokio's clock.
    pub clock: Arc<TokioClock>,
    /// Pod directories, volumes, and cgroups.
    pub disk: Arc<Disk>,
    /// Configuration of the agents that start on this machine.
    pub setup: Setup,
    allocated: Arc<MemoryFile>,
    actuated: Arc<MemoryFile>,
}

/// One run of the agent.
pub struct Agent {
    /// Handle of the sync loop.
    pub engine: EngineHandle,
    /// PLEG, owner of the pod store.
    pub pleg: Arc<Pleg>,
    /// Status manager.
    pub status: Arc<StatusManager>,
    /// Recorder of the events emitted so far.
    pub events: Arc<Recorder>,
    /// Scripted probe results.
    pub probes: Arc<Probes>,
    /// Desired mirror pods.
    pub mirrors: Arc<MirrorPodRecorder>,
    /// Metrics registry of this run.
    pub registry: Registry,
    /// Tracker of all tasks of this run.
    pub tasks: TaskTracker,
    source_senders: BTreeMap<PodSource, SourceSender>,
    leash: KillSwitch,
    shutdown: CancellationToken,
}

impl Machine {
    /// Creates a machine with the default setup.
    pub fn new() -> Self {
        Self::with(Setup::default())
    }

    /// Creates a machine whose agents use `setup`.
    pub fn with(setup: Setup) -> Self {
        let clock = Arc::new(TokioClock::new());
        let cri = ScriptedCri::new(clock.clone());
        Self { cri, clock, disk: Arc::default(), setup, allocated: Arc::default(), actuated: Arc::default() }
    }

    /// Makes writes of the state files fail, or succeed again.
    pub fn refuse_writes(&self, refuse: bool) {
        self.allocated.refuse_writes(refuse);
        self.actuated.refuse_writes(refuse);
    }

    /// Ends failing mounts, mount delays, and failing writes of state files; exhausted limits and hung removals stay.
    pub fn clear_disk_faults(&self) {
        self.disk.allow_mounts();
        self.disk.set_pace(Duration::ZERO);
        self.refuse_writes(false);
    }

    /// Pod UIDs in the state files: allocated, and actuated.
    pub fn stored_uids(&self) -> [Vec<PodUid>; 2] {
        [self.allocated.pods(), self.actuated.pods()]
    }

    /// Starts an agent. It knows no pods until its sources submit a set.
    pub async fn start(&self) -> Agent {
        let parts = self.parts().await;
        let registry = parts.registry.clone();
        let (check, runtime_state) =
            RuntimeCheck::new(Arc::new(parts.leash.clone()), vec![("PLEG", health_of(&parts.pleg))]);
        let (reports, reported) = engine::reports();
        let allocator = self.allocator(&parts).await;
        let status = Arc::new(StatusManager::new(StatusMetrics::new(&registry)));
        let mirrors = Arc::<MirrorPodRecorder>::default();
        let context = Arc::new(WorkerContext {
            runtime: parts.runtime.clone(),
            observer: parts.pleg.clone(),
            volumes: self.disk.clone(),
            probes: parts.probes.clone(),
            resources: self.disk.clone(),
            devices: self.setup.devices.clone(),
            claims: Arc::new(NoClaims),
            objects: Arc::new(NoApi),
            mirrors: mirrors.clone(),
            events: parts.events.clone(),
            clock: self.clock.clone(),
            allocations: allocator.allocations(),
            status: status.clone(),
            node: watch::channel(Arc::new(self.setup.node.clone())).1,
            runtime_state,
            metrics: EngineMetrics::new(&registry),
            config: EngineConfig { started_at: self.clock.now(), ..EngineConfig::default() },
            reports,
            tasks: parts.tasks.clone(),
            shutdown: parts.shutdown.clone(),
        });
        let (to_mux, sets) = mpsc::channel(1);
        let senders =
            self.setup.sources.iter().map(|source| (*source, SourceSender::new(*source, to_mux.clone()))).collect();
        let changes = self.mux(&parts, sets);
        let ready = SourceReadiness::new(self.setup.sources.iter().copied());
        let engine = engine::start(context, SyncLoopInputs { changes, reports: reported, ready, allocator });
        let (tasks, stop) = (&parts.tasks, &parts.shutdown);
        tasks.spawn(check.run(stop.clone()));
        tasks.spawn(parts.runtime.clone().run(stop.clone()));
        tasks.spawn(parts.runtime.clone().run_gc(Arc::new(engine.pods.clone()), stop.clone()));
        tasks.spawn(prune(parts.died, parts.runtime.clone(), engine.pods.clone(), stop.clone()));
        Agent {
            engine,
            pleg: parts.pleg,
            status,
            events: parts.events,
            probes: parts.probes,
            mirrors,
            registry,
            tasks: parts.tasks,
            source_senders: senders,
            leash: parts.leash,
            shutdown: parts.shutdown,
        }
    }

    async fn parts(&self) -> Parts {
        let (registry, leash) = (Registry::new(), KillSwitch::new(self.cri.clone()));
        let (tasks, shutdown) = (TaskTracker::new(), CancellationToken::new());
        let (events, probes) = (Arc::<Recorder>::default(), Arc::<Probes>::default());
        let images = self.images(&leash, &events, &registry).await;
        let (to_prune, died) = mpsc::channel(50);
        let deps = PlegDeps {
            cri: Arc::new(leash.clone()),
            hints: vec![Arc::new(CriEvents::new(Arc::new(leash.clone())))],
            messages: Arc::new(RuntimeMessages),
            clock: self.clock.clone(),
            metrics: PlegMetrics::new(&registry),
            died: Some(to_prune),
        };
        let (pleg, watching) = pleg::start(deps, PlegConfig::default(), shutdown.clone());
        tasks.spawn(async move {
            watching.await.expect("PLEG panicked");
        });
        let deps = RuntimeDeps {
            cri: Arc::new(leash.clone()),
            images,
            prepare: Arc::new(PlainRequests(self.cri.clone())),
            events: events.clone(),
            probes: probes.clone(),
            resources: self.disk.clone(),
            objects: Arc::new(NoApi),
            logs: Arc::new(NoLogs),
            actuated: ActuatedStore::open(leash.file(self.actuated.clone()))
                .await
                .expect("failed to load the state file"),
            clock: self.clock.clone(),
            metrics: RuntimeMetrics::new(&registry),
        };
        let mut config = RuntimeConfig::new("scripted");
        (config.backoff.initial, config.backoff.max) = self.setup.backoff;
        let runtime = RuntimeManager::new(deps, config);
        Parts { leash, registry, tasks, shutdown, events, probes, pleg, died, runtime }
    }

    async fn images(
        &self,
        leash: &KillSwitch,
        events: &Arc<Recorder>,
        registry: &Registry,
    ) -> Arc<images::ImageManager> {
        let nowhere = PathBuf::from("/nonexistent");
        let deps = images::ImagesDeps {
            images: Arc::new(leash.clone()),
            runtime: Arc::new(leash.clone()),
            events: events.clone(),
            clock: self.clock.clone(),
            registry: registry.clone(),
            room: Arc::new(|_| Ok(images::DiskSpace { capacity: 1000, available: 1000 })),
            on_pull: Arc::new(|_, _| {}),
            accounts: None,
        };
        // Without pull records: they are files, and have their own tests.
        let config = images::ImagesConfig {
            root: nowhere.clone(),
            max_pods: 110,
            registry_qps: 0,
            registry_burst: 0,
            parallelism: images::Parallelism::Unlimited,
            verification: None,
            handler_in_calls: false,
            docker: images::DockerFolders { root: nowhere, working: None, home: None },
            plugins: None,
            gc: images::GcPolicy::default(),
        };
        let manager = images::ImageManager::new(deps, config).await.expect("failed to open the image manager");
        if self.setup.reads_logins {
            let request = EnsureImage {
                pod: simple("logins"),
                image: "logins".to_owned(),
                policy: PullPolicy::Always,
                secrets: Arc::from([]),
                sandbox: None,
                handler: String::new(),
                field_path: None,
                progress: PodProgress::new(),
            };
            manager.ensure(request).await.expect("pulled");
        }
        manager
    }

    async fn allocator(&self, parts: &Parts) -> Allocator {
        let deps = AllocatorDeps {
            file: parts.leash.file(self.allocated.clone()),
            events: parts.events.clone(),
            clock: self.clock.clone(),
            rules: engine::admission::AdmissionRules::default(),
            admission: AdmissionMetrics::new(&parts.registry),
            allocation: AllocationMetrics::new(&parts.registry),
        };
        Allocator::load(deps).await.expect("failed to load the state file")
    }

    fn mux(&self, parts: &Parts, sets: mpsc::Receiver<SourceSet>) -> mpsc::Receiver<berth_types::PodChange> {
        let (to_engine, changes) = mpsc::channel(50);
        let clock = self.clock.clone();
        let mux = Mux {
            sets,
            changes: to_engine,
            events: parts.events.clone(),
            metrics: SourceMetrics::new(&parts.registry),
            now: Arc::new(move || clock.now()),
        };
        parts.tasks.spawn(mux.run(parts.shutdown.clone()));
        changes
    }
}

impl Default for Machine {
    fn default() -> Self {
        Self::new()
    }
}

struct Parts {
    leash: KillSwitch,
    registry: Registry,
    tasks: TaskTracker,
    shutdown: CancellationToken,
    events: Arc<Recorder>,
    probes: Arc<Probes>,
    pleg: Arc<Pleg>,
    died: mpsc::Receiver<ContainerDied>,
    runtime: Arc<RuntimeManager>,
}

fn health_of(pleg: &Arc<Pleg>) -> Arc<dyn Fn() -> Option<String> + Send + Sync> {
    let pleg = pleg.clone();
    Arc::new(move || pleg.health())
}

/// Keeps only the newest instance of each container that died (spec 02a §9.8).
async fn prune(
    mut died: mpsc::Receiver<ContainerDied>,
    runtime: Arc<RuntimeManager>,
    pods: engine::PodReader,
    stop: CancellationToken,
) {
    loop {
        let dead = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            dead = died.recv() => dead,
        };
        let Some(dead) = dead else { return };
        let all = pods.should_pod_content_be_removed(&dead.pod.id.uid);
        runtime.prune(&dead.pod, Some((&dead.container, &dead.id)), all);
    }
}

impl Agent {
    /// Submits the full pod set of a source.
    pub async fn submit(&self, source: PodSource, pods: impl IntoIterator<Item = Arc<api::Pod>>) {
        let pods = pods.into_iter().map(|pod| Arc::new(Pod::new((*pod).clone()).expect("invalid pod")));
        self.source_senders[&source].send(pods.collect()).await;
    }

    /// Submits these pods as the file source, and an empty set for every other source.
    pub async fn only_static<'a>(&self, pods: impl IntoIterator<Item = &'a Arc<Pod>>) {
        for source in self.source_senders.keys().filter(|source| **source != PodSource::File) {
            self.submit(*source, []).await;
        }
        self.files(pods).await;
    }

    /// Submits these pods as the file source.
    pub async fn files<'a>(&self, pods: impl IntoIterator<Item = &'a Arc<Pod>>) {
        self.submit(PodSource::File, pods.into_iter().map(|pod| Arc::new(pod.to_object()))).await;
    }

    /// Submits these pods as the API source.
    pub async fn api<'a>(&self, pods: impl IntoIterator<Item = &'a Arc<Pod>>) {
        self.submit(PodSource::Api, pods.into_iter().map(|pod| Arc::new(pod.to_object()))).await;
    }

    /// State of every pod worker.
    pub async fn describe(&self) -> Vec<WorkerView> {
        let (reply, answer) = oneshot::channel();
        self.engine.commands.send(SyncLoopCommand::Describe(reply)).await.expect("the sync loop has ended");
        answer.await.expect("no reply from the sync loop")
    }

    /// Step that a pod waits for, as `why` would report it now.
    pub fn waits_for(&self, uid: &PodUid) -> Option<String> {
        let snapshot = self.engine.pods.latest();
        let standing = snapshot.workers.iter().find(|standing| standing.id.uid == *uid)?;
        Some(standing.view()?.name.into_owned())
    }

    /// Waits (in tokio's time) until `passes` returns true for the status of a pod.
    ///
    /// # Panics
    /// The condition is not met within `limit`.
    pub async fn until(
        &self,
        uid: &PodUid,
        what: &str,
        limit: Duration,
        passes: impl Fn(&api::PodStatus) -> bool,
    ) -> Arc<api::PodStatus> {
        let mut changes = self.status.changes();
        let wait = async {
            loop {
                changes.borrow_and_update();
                if let Some(status) = self.status.status(uid).filter(|status| passes(status)) {
                    return status;
                }
                changes.changed().await.expect("the status manager has ended");
            }
        };
        match tokio::time::timeout(limit, wait).await {
            Ok(status) => status,
            Err(_) => {
                panic!("{uid}: timed out after {limit:?} waiting for: {what}; status: {:#?}", self.status.status(uid))
            }
        }
    }

    /// Waits until the `Ready` condition of a pod is `True`.
    pub async fn until_ready(&self, uid: &PodUid, limit: Duration) -> Arc<api::PodStatus> {
        let ready =
            |s: &api::PodStatus| s.conditions.iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
        self.until(uid, "ready", limit, ready).await
    }

    /// Sum of a counter or gauge over the series that have `label` as a label value; all series if it is empty.
    pub fn metric(&self, name: &str, label: &str) -> f64 {
        let families = self.registry.gather();
        let Some(family) = families.iter().find(|f| f.name() == name) else { return 0.0 };
        let carries =
            |m: &&::prometheus::proto::Metric| label.is_empty() || m.get_label().iter().any(|l| l.value() == label);
        family
            .get_metric()
            .iter()
            .filter(carries)
            .map(|m| m.get_counter().get_value() + m.get_gauge().get_value())
            .sum()
    }

    /// Stops the agent gracefully: pods keep running, no task remains.
    ///
    /// # Panics
    /// Tasks remain after `limit`.
    pub async fn stop(self, limit: Duration) {
        self.shutdown.cancel();
        self.tasks.close();
        let ended = tokio::time::timeout(limit, self.tasks.wait()).await;
        let ended = ended.is_ok() || self.is_dead(); // a kill during the stop leaves its tasks pending
        assert!(ended, "{} tasks are still running {limit:?} after the agent was stopped", self.tasks.len());
        self.leash.cut();
    }

    /// Kills the agent at one of its next calls of runtime or state files.
    pub fn set_kill_point(&self, fuse: Option<KillPoint>) {
        self.leash.set_fuse(fuse);
    }

    /// Whether the fuse has killed the agent: what remains is to clean up.
    pub fn is_dead(&self) -> bool {
        self.leash.is_cut()
    }

    /// Kills the agent as `kill -9` does.
    pub fn kill(self) {
        self.leash.cut();
        self.shutdown.cancel(); // ends the remaining tasks, which would only waste time
    }
}
