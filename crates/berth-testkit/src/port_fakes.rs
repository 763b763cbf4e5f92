//! Minimal fakes of the ports around engine and runtime: events, probes, volumes, cgroups, files.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use berth::{
    runtime::config_preparation::{ContainerRequest, PodLinuxResources, Prepare, PrepareError, SandboxRequest},
    sources::ports::SourceEvents,
};
use berth_ports::{
    ContainerExit, ContainerLogFile, ContainerLogs, ContainerTuning, EventRecord, EventSink, MirrorPodState,
    MirrorPods, MountedVolumes, ObjectError, ObjectSource, PodCgroup, PodCgroupValues, ProbeManager, ProbeResult,
    ProbeResults, PullSecret, RemovalPredicate, ResourceError, ResourceManager, StateFile, TerminationMessages,
    VolumeError, VolumeManager,
};
use berth_proto::cri;
use berth_types::{
    ContainerId, ContainerKind, Pod, PodFullName, PodRef, PodUid, api, hash, observation::ObservedContainer,
    resource_state,
};

use super::scripted_cri::ScriptedCri;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Event sink that keeps the events in memory.
#[derive(Default)]
pub struct Recorder(Mutex<Vec<EventRecord>>);

impl Recorder {
    /// All recorded events as `Reason: message`.
    pub fn texts(&self) -> Vec<String> {
        lock(&self.0).iter().map(|e| format!("{}: {}", e.reason, e.message)).collect()
    }

    /// Clears the recorded events.
    pub fn clear(&self) {
        *lock(&self.0) = Vec::new();
    }
}

impl EventSink for Recorder {
    fn record(&self, event: EventRecord) {
        lock(&self.0).push(event);
    }
}

impl SourceEvents for Recorder {
    fn warning(&self, pod: &PodRef, reason: &'static str, message: String) {
        lock(&self.0).push(EventRecord::warning(pod, reason, message));
    }

    fn observed(&self, _pod: &Arc<Pod>) {}
}

/// Probe manager with scripted results; containers without a scripted result pass all probes.
#[derive(Default)]
pub struct Probes {
    results: Mutex<HashMap<ContainerId, ProbeResults>>,
    calls: Mutex<Vec<String>>,
}

impl Probes {
    /// Sets the probe results of a container, by its ID.
    pub fn set_results(&self, container: &str, results: ProbeResults) {
        lock(&self.results).insert(container.into(), results);
    }

    /// Calls to `add`, `stop_liveness`, and `remove`, as text with the pod UID.
    pub fn calls(&self) -> Vec<String> {
        lock(&self.calls).clone()
    }

    /// Clears the recorded calls.
    pub fn clear(&self) {
        *lock(&self.calls) = Vec::new();
    }
}

impl ProbeManager for Probes {
    fn add(&self, pod: &Arc<Pod>) {
        lock(&self.calls).push(format!("add {}", pod.uid()));
    }

    fn stop_liveness(&self, pod: &PodUid) {
        lock(&self.calls).push(format!("stop liveness {pod}"));
    }

    fn remove(&self, pod: &PodUid) {
        lock(&self.calls).push(format!("remove {pod}"));
    }

    fn trigger(&self, _pod: &PodUid, _container: &str) {}
    fn results(&self, container: &ContainerId) -> ProbeResults {
        let passed = Some(ProbeResult::Success);
        let all = ProbeResults { startup: passed, readiness: passed, liveness: passed };
        lock(&self.results).get(container).copied().unwrap_or(all)
    }
}

/// Volume and resource manager in memory: pod directories and cgroups, which outlive the agent.
#[derive(Default)]
pub struct Disk {
    pods: Mutex<BTreeSet<PodUid>>,
    cgroups: Mutex<BTreeSet<PodUid>>,
    unmountable: Mutex<BTreeSet<String>>,
    exhausted: Mutex<BTreeSet<String>>,
    pace: Mutex<Duration>,
    stuck: Mutex<BTreeSet<PodUid>>,
    memory_in_use: AtomicU64,
}

impl Disk {
    /// UIDs of the pods that have a directory.
    pub fn pods(&self) -> BTreeSet<PodUid> {
        lock(&self.pods).clone()
    }

    /// UIDs of the pods that have a cgroup.
    pub fn cgroups(&self) -> BTreeSet<PodUid> {
        lock(&self.cgroups).clone()
    }

    /// Makes mounts of the pod with that name fail.
    pub fn refuse_mounts(&self, pod: &str) {
        lock(&self.unmountable).insert(pod.to_owned());
    }

    /// Makes mounts of the pod with that name fail with `LimitExceeded`, as at the volume attachment limit.
    pub fn exhaust_mounts(&self, pod: &str) {
        lock(&self.exhausted).insert(pod.to_owned());
    }

    /// Sets the memory usage of every pod and container, in bytes.
    pub fn use_memory(&self, bytes: u64) {
        self.memory_in_use.store(bytes, Ordering::Relaxed);
    }

    /// Removes the cgroup of a pod behind the agent's back.
    pub fn lose_cgroup(&self, pod: &PodUid) {
        lock(&self.cgroups).remove(pod);
    }

    /// Removes the faults of [`Self::refuse_mounts`].
    pub fn allow_mounts(&self) {
        lock(&self.unmountable).clear();
    }

    /// Makes the removal of a pod's directory hang forever.
    pub fn hang_removal(&self, pod: &PodUid) {
        lock(&self.stuck).insert(pod.clone());
    }

    /// Sets the duration of every mount and unmount.
    pub fn set_pace(&self, pace: Duration) {
        *lock(&self.pace) = pace;
    }

    async fn work(&self) {
        let pace = *lock(&self.pace);
        if !pace.is_zero() {
            tokio::time::sleep(pace).await;
        }
    }

    /// Simulates a reboot: empties the cgroup tree.
    pub fn reboot(&self) {
        lock(&self.cgroups).clear();
    }
}

#[async_trait]
impl VolumeManager for Disk {
    async fn mount(&self, pod: &Arc<Pod>) -> Result<Arc<MountedVolumes>, VolumeError> {
        self.work().await;
        lock(&self.pods).insert(pod.uid().clone());
        if lock(&self.exhausted).contains(pod.name()) {
            return Err(VolumeError::LimitExceeded("Node has reached its volume attachment limit".to_owned()));
        }
        if lock(&self.unmountable).contains(pod.name()) {
            return Err(VolumeError::Failed("mount failure requested by the test".to_owned()));
        }
        Ok(Arc::default())
    }

    async fn unmount(&self, _pod: &PodUid) -> Result<(), VolumeError> {
        self.work().await;
        Ok(())
    }

    async fn pods_on_disk(&self) -> Vec<PodUid> {
        lock(&self.pods).iter().cloned().collect()
    }

    async fn remove_directory(&self, pod: &PodUid) -> Result<(), VolumeError> {
        if lock(&self.stuck).contains(pod) {
            std::future::pending::<()>().await;
        }
        lock(&self.pods).remove(pod);
        Ok(())
    }
}

#[async_trait]
impl ResourceManager for Disk {
    fn cgroup_parent(&self, pod: &Pod) -> String {
        format!("/kubepods/pod{}", pod.uid())
    }

    async fn exists(&self, pod: &Pod) -> bool {
        lock(&self.cgroups).contains(pod.uid())
    }

    async fn ensure(&self, pod: &Arc<Pod>) -> Result<PodCgroup, ResourceError> {
        let created = lock(&self.cgroups).insert(pod.uid().clone());
        Ok(PodCgroup { parent: self.cgroup_parent(pod), created })
    }

    async fn remove(&self, pod: &PodRef) -> Result<(), ResourceError> {
        lock(&self.cgroups).remove(&pod.uid);
        Ok(())
    }

    async fn pods(&self) -> Vec<PodUid> {
        lock(&self.cgroups).iter().cloned().collect()
    }

    fn tuning(&self, _pod: &Pod, _kind: ContainerKind, _container: &str) -> Result<ContainerTuning, ResourceError> {
        Ok(ContainerTuning::default())
    }

    fn released(&self, _pod: &PodUid, _container: &str) {}

    fn desired_pod_values(&self, _pod: &Pod) -> Result<PodCgroupValues, ResourceError> {
        Ok(PodCgroupValues::default()) // no limits
    }

    async fn current_pod_values(&self, _pod: &Pod) -> Result<PodCgroupValues, ResourceError> {
        Ok(PodCgroupValues::default())
    }

    async fn apply_pod_values(&self, _pod: &Pod, _values: PodCgroupValues) -> Result<(), ResourceError> {
        Ok(())
    }

    async fn memory_usage(&self, _pod: &Pod, _container: Option<&ContainerId>) -> Result<Option<u64>, ResourceError> {
        Ok(Some(self.memory_in_use.load(Ordering::Relaxed)))
    }
}

/// State file in memory.
#[derive(Debug, Default)]
pub struct MemoryFile {
    content: Mutex<Option<Vec<u8>>>,
    refused: AtomicBool,
}

impl MemoryFile {
    /// Makes writes fail with `StorageFull`, or succeed again.
    pub fn refuse_writes(&self, refuse: bool) {
        self.refused.store(refuse, Ordering::Relaxed);
    }

    /// UIDs of the pods in the file.
    pub fn pods(&self) -> Vec<PodUid> {
        let content = lock(&self.content).clone();
        let entries = content.map(|bytes| resource_state::decode(&bytes).expect("invalid checkpoint"));
        entries.unwrap_or_default().into_keys().collect()
    }
}

#[async_trait]
impl StateFile for MemoryFile {
    fn path(&self) -> &Path {
        Path::new("/in/memory")
    }

    async fn read(&self) -> io::Result<Option<Vec<u8>>> {
        Ok(lock(&self.content).clone())
    }

    async fn replace(&self, content: Vec<u8>) -> io::Result<()> {
        if self.refused.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        *lock(&self.content) = Some(content);
        Ok(())
    }
}

/// Termination messages: returns the runtime's own message unchanged.
pub struct RuntimeMessages;

#[async_trait]
impl TerminationMessages for RuntimeMessages {
    async fn message(&self, exit: ContainerExit) -> String {
        exit.message
    }
}

/// Container logs without files: every operation succeeds and does nothing.
pub struct NoLogs;

#[async_trait]
impl ContainerLogs for NoLogs {
    async fn link(&self, _file: ContainerLogFile) {}
    async fn remove(&self, _file: ContainerLogFile) -> Result<(), String> {
        Ok(())
    }
    async fn remove_directory(&self, _pod: PodRef) -> Result<(), String> {
        Ok(())
    }
    async fn remove_directories(&self, _may_go: RemovalPredicate) {}
    async fn remove_dangling_links(&self, _alive: HashSet<ContainerId>) {}
}

/// Object source without an API server: reads of ConfigMaps and Secrets fail with `NoClient`.
pub struct NoApi;

#[async_trait]
impl ObjectSource for NoApi {
    async fn config_map(&self, namespace: &str, name: &str) -> Result<Arc<BTreeMap<String, String>>, ObjectError> {
        Err(ObjectError::NoClient { kind: "configMap", namespace: namespace.to_owned(), name: name.to_owned() })
    }
    async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<BTreeMap<String, Vec<u8>>>, ObjectError> {
        Err(ObjectError::NoClient { kind: "secret", namespace: namespace.to_owned(), name: name.to_owned() })
    }
    fn services(&self, _namespace: &str) -> Option<Vec<Arc<api::Service>>> {
        Some(Vec::new())
    }
    async fn runtime_handler(&self, _class: Option<&str>) -> Result<String, ObjectError> {
        Ok(String::new())
    }
    async fn pull_secrets(&self, _pod: &Pod) -> (Vec<PullSecret>, Vec<String>) {
        (Vec::new(), Vec::new())
    }
}

/// Mirror pod manager that records the requests.
#[derive(Default)]
pub struct MirrorPodRecorder {
    wanted: Mutex<BTreeSet<PodUid>>,
    kept: Mutex<HashMap<PodFullName, MirrorPodState>>,
}

impl MirrorPodRecorder {
    /// Whether a mirror pod of that pod was requested.
    pub fn wanted(&self, uid: &PodUid) -> bool {
        lock(&self.wanted).contains(uid)
    }

    /// Clears the record of requested mirror pods.
    pub fn clear(&self) {
        lock(&self.wanted).clear();
    }

    /// State last requested for a full pod name.
    pub fn last_state(&self, name: &PodFullName) -> Option<MirrorPodState> {
        lock(&self.kept).get(name).cloned()
    }
}

impl MirrorPods for MirrorPodRecorder {
    fn ensure(&self, pod: &Arc<Pod>) {
        lock(&self.wanted).insert(pod.uid().clone());
    }

    fn set_desired(&self, names: HashMap<PodFullName, MirrorPodState>) {
        *lock(&self.kept) = names;
    }
}

/// CRI requests with identity labels, annotations, and paths only; resources are empty.
pub struct PlainRequests(pub Arc<ScriptedCri>);

fn identity(pod: &Pod, container: Option<&str>) -> HashMap<String, String> {
    let mut labels = HashMap::from([
        ("io.kubernetes.pod.name".to_owned(), pod.name().to_owned()),
        ("io.kubernetes.pod.namespace".to_owned(), pod.namespace().to_owned()),
        ("io.kubernetes.pod.uid".to_owned(), pod.uid().to_string()),
    ]);
    labels.extend(container.map(|name| ("io.kubernetes.container.name".to_owned(), name.to_owned())));
    labels
}

#[async_trait]
impl Prepare for PlainRequests {
    async fn sandbox(&self, request: SandboxRequest<'_>) -> Result<cri::PodSandboxConfig, PrepareError> {
        let pod = request.pod;
        let network = if pod.is_host_network() { cri::NamespaceMode::Node } else { cri::NamespaceMode::Pod };
        let options = cri::NamespaceOption { network: network as i32, ..Default::default() };
        let context = cri::LinuxSandboxSecurityContext { namespace_options: Some(options), ..Default::default() };
        Ok(cri::PodSandboxConfig {
            linux: Some(cri::LinuxPodSandboxConfig { security_context: Some(context), ..Default::default() }),
            metadata: Some(cri::PodSandboxMetadata {
                name: pod.name().to_owned(),
                uid: pod.uid().to_string(),
                namespace: pod.namespace().to_owned(),
                attempt: request.attempt,
            }),
            log_directory: format!("/var/log/pods/{}_{}_{}", pod.namespace(), pod.name(), pod.uid()),
            labels: identity(pod, None),
            annotations: pod.annotations().clone().into_iter().collect(),
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
        let grace = pod.spec().termination_grace_period_seconds;
        annotations.extend(grace.map(|s| ("io.kubernetes.pod.terminationGracePeriod".to_owned(), s.to_string())));
        Ok(cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata { name: container.name.clone(), attempt: restart_count }),
            image: Some(cri::ImageSpec { image: request.image.reference.clone(), ..Default::default() }),
            labels: identity(pod, Some(&container.name)),
            annotations,
            log_path: PathBuf::from(&container.name).join(format!("{restart_count}.log")).display().to_string(),
            ..Default::default()
        })
    }

    async fn restart_count(&self, pod: &Pod, container: &str, newest: Option<&ObservedContainer>) -> u32 {
        let logged = || self.0.last_log(pod.uid().as_str(), container);
        let last = newest.map(|c| u32::try_from(c.restart_count).expect("not negative")).or_else(logged);
        last.map_or(0, |last| last + 1)
    }

    fn container_resources(&self, _pod: &Pod, _container: &api::Container) -> cri::LinuxContainerResources {
        cri::LinuxContainerResources::default()
    }

    fn pod_resources(&self, _pod: &Pod) -> PodLinuxResources {
        PodLinuxResources::default()
    }
}
