//! Fixture: a runtime manager on the scripted CRI, with minimal fakes of its other dependencies.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use berth::runtime::{
    ActuatedStore, RuntimeConfig, RuntimeDeps, RuntimeManager,
    config_preparation::{ContainerRequest, PodLinuxResources, Prepare, PrepareError, SandboxRequest},
};
use berth_cri::ImageService;
use berth_metrics::{Registry, RuntimeMetrics};
use berth_ports::{
    Clock, ContainerLogFile, ContainerLogs, ContainerTuning, EnsureImage, EventRecord, EventSink, Grace, ImageError,
    ImageProvider, ImageUser, KillPod, MountedVolumes, ObjectError, ObjectSource, PodCgroup, PodCgroupValues,
    PodProgress, PodRuntime, ProbeManager, ProbeResult, ProbeResults, PullSecret, RemovalPredicate, ResolvedImage,
    ResourceError, ResourceManager, SyncOutcome, SyncPod,
};
use berth_proto::cri;
use berth_types::{
    ContainerId, ContainerKind, Pod, PodRef, PodUid, api, hash,
    observation::{
        ContainerState, Generation, NetworkMode, ObservedContainer, ObservedPod, ObservedSandbox, SandboxState,
    },
};
use jiff::Timestamp;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use berth_testkit::{clock::TokioClock, scripted_cri::ScriptedCri};

/// Runtime manager, CRI, clock, fakes, and metrics.
pub struct Fixture {
    pub cri: Arc<ScriptedCri>,
    pub runtime: Arc<RuntimeManager>,
    pub clock: Arc<TokioClock>,
    pub world: Arc<FakeState>,
    pub registry: Registry,
    pub stopping: CancellationToken,
}

/// State and records of the fakes.
#[derive(Default)]
pub struct FakeState {
    pub events: Mutex<Vec<EventRecord>>,
    pub probes: Mutex<HashMap<ContainerId, ProbeResults>>,
    pub pull_takes: Mutex<HashMap<String, Duration>>,
    pub missing_images: Mutex<HashSet<String>>,
    pub links: Mutex<Vec<ContainerLogFile>>,
    pub removed_logs: Mutex<Vec<ContainerLogFile>>,
    pub removed_log_directories: Mutex<Vec<PodRef>>,
    pub values: Mutex<Option<(PodCgroupValues, PodCgroupValues)>>,
    pub written: Mutex<Vec<PodCgroupValues>>,
    pub memory_in_use: Mutex<Option<u64>>,
    pub ready_calls: Mutex<usize>,
}

impl Fixture {
    pub fn new() -> Self {
        let clock = Arc::new(TokioClock::new());
        let cri = ScriptedCri::new(clock.clone());
        let world = Arc::new(FakeState::default());
        let registry = Registry::new();
        let deps = RuntimeDeps {
            cri: cri.clone(),
            images: Arc::new(Images { cri: cri.clone(), world: world.clone() }),
            prepare: Arc::new(Plain),
            events: Arc::new(Sink(world.clone())),
            probes: Arc::new(Probes(world.clone())),
            resources: Arc::new(Resources(world.clone())),
            objects: Arc::new(NoObjects),
            logs: Arc::new(Logs(world.clone())),
            actuated: ActuatedStore::volatile(),
            clock: clock.clone(),
            metrics: RuntimeMetrics::new(&registry),
        };
        let runtime = RuntimeManager::new(deps, RuntimeConfig::new("scripted"));
        Self { cri, runtime, clock, world, registry, stopping: CancellationToken::new() }
    }

    /// The pod as the runtime has it now.
    pub fn observe(&self, pod: &Pod) -> Arc<ObservedPod> {
        let mut seen = ObservedPod::empty(pod.id().clone(), Generation(1), self.clock.now());
        for sandbox in
            self.cri.sandboxes().iter().filter(|s| s.metadata.as_ref().is_some_and(|m| m.uid == pod.uid().as_str()))
        {
            seen.sandboxes.push(observed_sandbox(sandbox));
        }
        let homes: HashMap<String, String> = self.cri.listed().into_iter().map(|c| (c.id, c.pod_sandbox_id)).collect();
        for container in
            self.cri.containers().iter().filter(|c| label(&c.labels, "io.kubernetes.pod.uid") == pod.uid().as_str())
        {
            seen.containers.push(observed_container(container, &homes[&container.id]));
        }
        seen.sort();
        if let Some(sandbox) = seen.sandboxes.first() {
            seen.ips.clone_from(&sandbox.ips);
        }
        Arc::new(seen)
    }

    pub fn request(&self, pod: &Arc<Pod>) -> SyncPod {
        let world = self.world.clone();
        SyncPod {
            pod: pod.clone(),
            observed: self.observe(pod),
            status: Arc::new(api::PodStatus::default()),
            secrets: Arc::from(Vec::<PullSecret>::new()),
            volumes: Arc::new(MountedVolumes::default()),
            cgroup_parent: "/kubepods/pod".to_owned(),
            restart_all: false,
            stopping: self.stopping.clone(),
            sandbox_ready: Arc::new(move || *world.ready_calls.lock().expect("unpoisoned") += 1),
            progress: PodProgress::new(),
        }
    }

    /// One sync with a fresh observation.
    pub async fn turn(&self, pod: &Arc<Pod>) -> SyncOutcome {
        self.runtime.sync_pod(self.request(pod)).await
    }

    /// One sync that must succeed.
    pub async fn good_turn(&self, pod: &Arc<Pod>) -> SyncOutcome {
        let outcome = self.turn(pod).await;
        assert_eq!(outcome.error_text(), None);
        outcome
    }

    pub fn kill_request(
        &self,
        pod: Option<&Arc<Pod>>,
        observed: Arc<ObservedPod>,
        grace: watch::Receiver<Option<Grace>>,
    ) -> KillPod {
        KillPod { pod: pod.cloned(), observed, grace, progress: PodProgress::new() }
    }

    /// Kills a pod, with a grace period of that many seconds if given.
    pub async fn kill(&self, pod: &Arc<Pod>, grace: Option<i64>) -> Result<(), String> {
        let (_sender, receiver) = watch::channel(grace.map(Grace::from_secs));
        self.runtime.kill_pod(self.kill_request(Some(pod), self.observe(pod), receiver)).await
    }

    /// `op target` of all calls but read-only ones.
    pub fn changes(&self) -> Vec<String> {
        let read_only = ["image_status", "podsandbox_status", "container_status"];
        let calls = self.cri.calls().into_iter().filter(|c| !read_only.contains(&c.op));
        calls.map(|c| format!("{} {}", c.op, c.target)).collect()
    }

    /// Names of all calls.
    pub fn ops(&self) -> Vec<&'static str> {
        self.cri.calls().into_iter().map(|c| c.op).collect()
    }

    /// Grace periods of StopContainer calls, as `target seconds`.
    pub fn graces(&self) -> Vec<String> {
        let stops = self.cri.calls().into_iter().filter(|c| c.op == "stop_container");
        stops.map(|c| format!("{} {}", c.target, c.detail)).collect()
    }

    /// `Reason: message` of all events.
    pub fn events(&self) -> Vec<String> {
        let events = self.world.events.lock().expect("unpoisoned");
        events.iter().map(|e| format!("{}: {}", e.reason, e.message)).collect()
    }

    /// Value of a metric, `name{label="value"}`; 0 if it does not exist.
    pub fn metric(&self, name: &str, label: &str) -> f64 {
        let families = self.registry.gather();
        let family = families.iter().find(|f| f.name() == name);
        let of = |m: &prometheus::proto::Metric| {
            let wanted = label.is_empty() || m.get_label().iter().any(|l| l.value() == label);
            wanted.then(|| m.get_counter().get_value() + m.get_histogram().get_sample_count() as f64)
        };
        family.into_iter().flat_map(|f| f.get_metric()).filter_map(of).sum()
    }
}

fn label<'a>(labels: &'a HashMap<String, String>, key: &str) -> &'a str {
    labels.get(key).map_or("", String::as_str)
}

fn time(nanoseconds: i64) -> Option<Timestamp> {
    (nanoseconds != 0).then(|| Timestamp::from_nanosecond(i128::from(nanoseconds)).expect("in range"))
}

fn observed_sandbox(sandbox: &cri::PodSandbox) -> ObservedSandbox {
    let ready = sandbox.state() == cri::PodSandboxState::SandboxReady;
    ObservedSandbox {
        id: sandbox.id.as_str().into(),
        attempt: sandbox.metadata.as_ref().map_or(0, |m| m.attempt),
        state: if ready { SandboxState::Ready } else { SandboxState::NotReady },
        created_at: time(sandbox.created_at).expect("created"),
        network_mode: NetworkMode::Pod,
        has_network: true,
        ips: if ready { vec!["10.88.0.1".parse().expect("an address")] } else { Vec::new() },
        runtime_handler: String::new(),
    }
}

fn observed_container(status: &cri::ContainerStatus, sandbox: &str) -> ObservedContainer {
    let exited = status.state() == cri::ContainerState::ContainerExited;
    let annotation = |key: &str| label(&status.annotations, key);
    ObservedContainer {
        id: status.id.as_str().into(),
        name: status.metadata.as_ref().expect("metadata").name.as_str().into(),
        sandbox: sandbox.into(),
        state: match status.state() {
            cri::ContainerState::ContainerCreated => ContainerState::Created,
            cri::ContainerState::ContainerRunning => ContainerState::Running,
            cri::ContainerState::ContainerExited => ContainerState::Exited,
            cri::ContainerState::ContainerUnknown => ContainerState::Unknown,
        },
        created_at: time(status.created_at).expect("created"),
        started_at: time(status.started_at),
        finished_at: time(status.finished_at).filter(|_| exited),
        exit_code: status.exit_code,
        reason: status.reason.clone(),
        message: status.message.clone(),
        image: String::new(),
        image_ref: status.image_ref.clone(),
        image_id: String::new(),
        hash: u32::from_str_radix(annotation("io.kubernetes.container.hash"), 16).ok(),
        restart_count: annotation("io.kubernetes.container.restartCount").parse().unwrap_or(0),
        log_path: status.log_path.clone(),
        resources: None,
        user: None,
    }
}

/// Configurations that contain the identity only.
struct Plain;

fn identity(pod: &Pod, container: Option<&str>) -> HashMap<String, String> {
    let mut labels = HashMap::from([
        ("io.kubernetes.pod.name".to_owned(), pod.name().to_owned()),
        ("io.kubernetes.pod.namespace".to_owned(), pod.namespace().to_owned()),
        ("io.kubernetes.pod.uid".to_owned(), pod.uid().to_string()),
    ]);
    if let Some(name) = container {
        labels.insert("io.kubernetes.container.name".to_owned(), name.to_owned());
    }
    labels
}

#[async_trait]
impl Prepare for Plain {
    async fn sandbox(&self, request: SandboxRequest<'_>) -> Result<cri::PodSandboxConfig, PrepareError> {
        let pod = request.pod;
        Ok(cri::PodSandboxConfig {
            metadata: Some(cri::PodSandboxMetadata {
                name: pod.name().to_owned(),
                uid: pod.uid().to_string(),
                namespace: pod.namespace().to_owned(),
                attempt: request.attempt,
            }),
            log_directory: format!("/var/log/pods/{}", pod.name()),
            labels: identity(pod, None),
            ..Default::default()
        })
    }

    async fn container(&self, request: ContainerRequest<'_>) -> Result<cri::ContainerConfig, PrepareError> {
        let ContainerRequest { pod, container, restart_count, .. } = request;
        let hash = hash::container_hash(&container.name, container.image.as_deref().unwrap_or_default());
        let mut annotations = HashMap::from([
            ("io.kubernetes.container.hash".to_owned(), format!("{hash:x}")),
            ("io.kubernetes.container.restartCount".to_owned(), restart_count.to_string()),
        ]);
        if let Some(grace) = pod.spec().termination_grace_period_seconds {
            annotations.insert("io.kubernetes.pod.terminationGracePeriod".to_owned(), grace.to_string());
        }
        Ok(cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata { name: container.name.clone(), attempt: restart_count }),
            image: Some(cri::ImageSpec { image: request.image.reference.clone(), ..Default::default() }),
            labels: identity(pod, Some(&container.name)),
            annotations,
            log_path: format!("{}/{restart_count}.log", container.name),
            ..Default::default()
        })
    }

    async fn restart_count(&self, _pod: &Pod, _container: &str, newest: Option<&ObservedContainer>) -> u32 {
        newest.map_or(0, |c| u32::try_from(c.restart_count).expect("small") + 1)
    }

    fn container_resources(&self, _pod: &Pod, container: &api::Container) -> cri::LinuxContainerResources {
        let limits = container.resources.as_ref().and_then(|r| r.limits.as_ref());
        let limit = limits.and_then(|l| l.get("memory")).map_or(0, |q| q.0.parse().expect("plain bytes"));
        cri::LinuxContainerResources { memory_limit_in_bytes: limit, ..Default::default() }
    }

    fn pod_resources(&self, _pod: &Pod) -> PodLinuxResources {
        PodLinuxResources::default()
    }
}

struct Images {
    cri: Arc<ScriptedCri>,
    world: Arc<FakeState>,
}

#[async_trait]
impl ImageProvider for Images {
    async fn ensure(&self, request: EnsureImage) -> Result<ResolvedImage, ImageError> {
        let failed = |reason, message: String| ImageError { reason, message, retry_at: None };
        let spec = cri::ImageSpec { image: request.image.clone(), ..Default::default() };
        let _present = self.cri.image_status(spec).await.map_err(|e| failed("ImageInspectError", e.to_string()))?;
        let takes = self.world.pull_takes.lock().expect("unpoisoned").get(&request.image).copied();
        if let Some(takes) = takes {
            tokio::time::sleep(takes).await;
            self.cri.add_image(&request.image, 1);
        }
        if self.world.missing_images.lock().expect("unpoisoned").contains(&request.image) {
            return Err(failed("ErrImagePull", format!("no {}", request.image)));
        }
        Ok(ResolvedImage { reference: request.image, user: ImageUser::Unset })
    }

    fn forget(&self, _pod: &PodUid) {}
}

struct Sink(Arc<FakeState>);

impl EventSink for Sink {
    fn record(&self, event: EventRecord) {
        self.0.events.lock().expect("unpoisoned").push(event);
    }
}

struct Probes(Arc<FakeState>);

impl FakeState {
    /// Sets the liveness probe of a container to failed.
    pub fn fail_liveness(&self, id: &str) {
        let failed = ProbeResults { liveness: Some(ProbeResult::Failure), ..ProbeResults::default() };
        self.probes.lock().expect("unpoisoned").insert(id.into(), failed);
    }
}

impl ProbeManager for Probes {
    fn add(&self, _pod: &Arc<Pod>) {}
    fn stop_liveness(&self, _pod: &PodUid) {}
    fn remove(&self, _pod: &PodUid) {}
    fn trigger(&self, _pod: &PodUid, _container: &str) {}
    fn results(&self, container: &ContainerId) -> ProbeResults {
        self.0.probes.lock().expect("unpoisoned").get(container).copied().unwrap_or_default()
    }
}

struct Resources(Arc<FakeState>);

#[async_trait]
impl ResourceManager for Resources {
    fn cgroup_parent(&self, _pod: &Pod) -> String {
        String::new()
    }
    async fn exists(&self, _pod: &Pod) -> bool {
        true
    }
    async fn ensure(&self, _pod: &Arc<Pod>) -> Result<PodCgroup, ResourceError> {
        Ok(PodCgroup { parent: String::new(), created: false })
    }
    async fn remove(&self, _pod: &PodRef) -> Result<(), ResourceError> {
        Ok(())
    }
    async fn pods(&self) -> Vec<PodUid> {
        Vec::new()
    }
    fn tuning(&self, _pod: &Pod, _kind: ContainerKind, _container: &str) -> Result<ContainerTuning, ResourceError> {
        Ok(ContainerTuning::default())
    }
    fn released(&self, _pod: &PodUid, _container: &str) {}
    fn desired_pod_values(&self, _pod: &Pod) -> Result<PodCgroupValues, ResourceError> {
        Ok(self.0.values.lock().expect("unpoisoned").expect("the test gives values").1)
    }
    async fn current_pod_values(&self, _pod: &Pod) -> Result<PodCgroupValues, ResourceError> {
        Ok(self.0.values.lock().expect("unpoisoned").expect("the test gives values").0)
    }
    async fn apply_pod_values(&self, _pod: &Pod, values: PodCgroupValues) -> Result<(), ResourceError> {
        self.0.written.lock().expect("unpoisoned").push(values);
        Ok(())
    }
    async fn memory_usage(&self, _pod: &Pod, _container: Option<&ContainerId>) -> Result<Option<u64>, ResourceError> {
        Ok(*self.0.memory_in_use.lock().expect("unpoisoned"))
    }
}

struct NoObjects;

#[async_trait]
impl ObjectSource for NoObjects {
    async fn config_map(&self, _ns: &str, name: &str) -> Result<Arc<BTreeMap<String, String>>, ObjectError> {
        Err(ObjectError::Other(name.to_owned()))
    }
    async fn secret(&self, _ns: &str, name: &str) -> Result<Arc<BTreeMap<String, Vec<u8>>>, ObjectError> {
        Err(ObjectError::Other(name.to_owned()))
    }
    fn services(&self, _namespace: &str) -> Option<Vec<Arc<api::Service>>> {
        None
    }
    async fn runtime_handler(&self, _class: Option<&str>) -> Result<String, ObjectError> {
        Ok(String::new())
    }
    async fn pull_secrets(&self, _pod: &Pod) -> (Vec<PullSecret>, Vec<String>) {
        (Vec::new(), Vec::new())
    }
}

struct Logs(Arc<FakeState>);

#[async_trait]
impl ContainerLogs for Logs {
    async fn link(&self, file: ContainerLogFile) {
        self.0.links.lock().expect("unpoisoned").push(file);
    }
    async fn remove(&self, file: ContainerLogFile) -> Result<(), String> {
        self.0.removed_logs.lock().expect("unpoisoned").push(file);
        Ok(())
    }
    async fn remove_directory(&self, pod: PodRef) -> Result<(), String> {
        self.0.removed_log_directories.lock().expect("unpoisoned").push(pod);
        Ok(())
    }
    async fn remove_directories(&self, _may_go: RemovalPredicate) {}
    async fn remove_dangling_links(&self, _alive: HashSet<ContainerId>) {}
}
