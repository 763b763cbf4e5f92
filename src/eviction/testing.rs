//! Fakes of eviction's dependencies, and a simulated node for tests.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use serde_json::{Value, json};
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use super::{
    EvictionConfig, Evictor, EvictorDeps, Watcher, WatcherDeps,
    message::EvictionVerdict,
    ports::{MemoryShortage, NodeStats, Pods, Reclaim, ThresholdNotifications, UsageScope},
    signals::{DiskReading, MemoryReading, PressureCondition, Readings},
    usage::PodUse,
};
use berth_config::{defaults, eviction};
use berth_metrics::{EvictionMetrics, Registry};
use berth_ports::{EventRecord, EventSink, TaskLiveness};
use berth_types::{Pod, PodUid};

const GI: u64 = 1 << 30;

/// A node with 8 GiB of memory and a disk of 100 GiB, on which pods use the given amounts.
pub struct FakeNode {
    state: Mutex<State>,
    moved: watch::Sender<u64>,
    kernel_notification: Notify,
}

struct State {
    memory_used: u64,
    /// Bytes of used memory that are reclaimable page cache.
    page_cache: u64,
    disk_used: u64,
    /// Bytes of unused images.
    images: u64,
    /// Bytes of unused images on a separate disk of 100 GiB for images and writable layers, if there is one.
    image_disk_used: Option<u64>,
    /// Maximum number of processes, and the number of those outside pods.
    processes: Option<(u64, u64)>,
    /// Durations of the removal of containers, of the kernel's page cache reclaim, and of a disk measurement.
    removal: Duration,
    taking: Duration,
    measuring: Duration,
    /// Requested scopes of pod usage, and the scope whose next request fails.
    asked: Vec<UsageScope>,
    refused: Option<UsageScope>,
    /// Reclaimed pages are used for something else immediately.
    fills: bool,
    pods: BTreeMap<String, RunningPod>,
    log: Vec<String>,
    conditions: Vec<BTreeSet<PressureCondition>>,
    hangs: bool,
    read_count: u64,
}

struct RunningPod {
    pod: Arc<Pod>,
    usage: PodUse,
    /// Time that the pod needs to terminate.
    ends_in: Duration,
}

impl FakeNode {
    fn with<R>(&self, act: impl FnOnce(&mut State) -> R) -> R {
        act(&mut self.state.lock().expect("whole"))
    }

    fn append_log(&self, what: impl Into<String>) {
        self.with(|state| state.log.push(what.into()));
        self.moved.send_modify(|count| *count += 1);
    }
}

#[async_trait]
impl NodeStats for FakeNode {
    async fn read(&self) -> Readings {
        if self.with(|state| state.hangs) {
            std::future::pending::<()>().await;
        }
        self.with(|state| {
            state.read_count += 1;
            let memory: u64 = state.pods.values().filter_map(|pod| pod.usage.memory).sum();
            let disk: u64 = state.pods.values().filter_map(|pod| pod.usage.storage).sum();
            let used = state.disk_used + state.images + disk;
            let available = (100 * GI).saturating_sub(used);
            let disk = DiskReading { device: 1, capacity: 100 * GI, available, inodes: 1000, inodes_free: 900 };
            let apart = |used| DiskReading { device: 2, available: 100 * GI - used, ..disk };
            let of_pods: u64 = state.pods.values().filter_map(|pod| pod.usage.processes).sum();
            Readings {
                memory: Some(MemoryReading { total: 8 * GI, working_set: state.memory_used + memory }),
                node_fs: Some(disk),
                image_fs: Some(state.image_disk_used.map_or(disk, apart)),
                processes: state.processes.map(|(max, others)| (max, others + of_pods)),
                ..Readings::default()
            }
        })
    }
}

#[async_trait]
impl ThresholdNotifications for FakeNode {
    async fn notified(&self) {
        self.kernel_notification.notified().await;
    }
}

#[async_trait]
impl Pods for FakeNode {
    fn active(&self) -> Vec<Arc<Pod>> {
        self.with(|state| state.pods.values().map(|running| running.pod.clone()).collect())
    }

    async fn usages(&self, needs: UsageScope) -> Result<HashMap<PodUid, PodUse>, String> {
        let (is_refused, measuring) = self.with(|state| {
            state.asked.push(needs);
            (state.refused.take_if(|refused| *refused == needs).is_some(), state.measuring)
        });
        if is_refused {
            return Err("for once".to_owned());
        }
        if matches!(needs, UsageScope::Disks | UsageScope::DisksNow) {
            tokio::time::sleep(measuring).await;
        }
        let usage = |running: &RunningPod| (running.pod.uid().clone(), running.usage.clone());
        Ok(self.with(|state| state.pods.values().map(usage).collect()))
    }

    async fn evict(&self, pod: &Arc<Pod>, verdict: &EvictionVerdict) -> Result<(), String> {
        self.append_log(format!("evict {} in {}s for {}", pod.name(), verdict.grace, verdict.signal));
        let Some(wait) = self.with(|state| state.pods.get(pod.name()).map(|running| running.ends_in)) else {
            return Ok(());
        };
        if tokio::time::timeout(Duration::from_secs(10), tokio::time::sleep(wait)).await.is_err() {
            return Err("timeout waiting to kill pod".to_owned());
        }
        self.with(|state| state.pods.remove(pod.name()));
        self.append_log(format!("{} is gone", pod.name()));
        Ok(())
    }

    async fn cleaned_up(&self, pod: &PodUid) {
        let mut moved = self.moved.subscribe();
        while self.with(|state| state.pods.values().any(|running| running.pod.uid() == pod)) {
            let _ = moved.changed().await; // the sender lives as long as the node
        }
    }
}

#[async_trait]
impl Reclaim for FakeNode {
    async fn containers(&self) -> Result<(), String> {
        self.append_log("remove containers");
        tokio::time::sleep(self.with(|state| state.removal)).await;
        Ok(())
    }

    async fn images(&self) -> Result<(), String> {
        self.with(|state| (state.images, state.image_disk_used) = (0, state.image_disk_used.map(|_| 0)));
        self.append_log("remove images");
        Ok(())
    }

    async fn page_cache(&self, worst: &PodUid, missing: MemoryShortage) -> bool {
        tokio::time::sleep(self.with(|state| state.taking)).await;
        let is_there = self.with(|state| state.page_cache >= missing.bytes);
        if is_there {
            self.with(|state| {
                state.page_cache -= missing.bytes;
                state.memory_used -= if state.fills { 0 } else { missing.bytes };
            });
            self.append_log(format!("take back {} of {worst} first, until {} are left", missing.bytes, missing.least));
        }
        is_there
    }
}

impl EventSink for FakeNode {
    fn record(&self, event: EventRecord) {
        self.append_log(format!("event {}: {}", event.reason, event.message));
    }
}

/// A node with running watcher and evictor.
pub struct Fixture {
    node: Arc<FakeNode>,
    registry: Registry,
    task_liveness: [TaskLiveness; 2],
    stop: CancellationToken,
}

impl Fixture {
    /// Creates a node with the thresholds of these configuration fields.
    pub fn new(fields: &Value) -> Self {
        let map = |name: &str| serde_json::from_value(fields[name].clone()).unwrap_or_default();
        let mut config = defaults::defaults();
        config.eviction_hard = map("hard");
        config.eviction_soft = map("soft");
        config.eviction_soft_grace_period = map("graces");
        config.eviction_minimum_reclaim = map("reclaims");
        let config = Arc::new(EvictionConfig {
            thresholds: eviction::thresholds(&config).expect("usable"),
            transition: Duration::from_secs(300),
            max_pod_grace: 5,
            local_storage: true,
        });
        let state = State {
            memory_used: GI,
            page_cache: 0,
            disk_used: GI,
            images: 0,
            image_disk_used: None,
            processes: None,
            removal: Duration::ZERO,
            taking: Duration::ZERO,
            measuring: Duration::ZERO,
            asked: Vec::new(),
            refused: None,
            fills: false,
            pods: BTreeMap::new(),
            log: Vec::new(),
            conditions: Vec::new(),
            hangs: false,
            read_count: 0,
        };
        let node = Arc::new(FakeNode {
            state: Mutex::new(state),
            moved: watch::channel(0).0,
            kernel_notification: Notify::new(),
        });
        let (registry, stop, began) = (Registry::new(), CancellationToken::new(), Instant::now());
        let metrics = EvictionMetrics::new(&registry);
        let observer = node.clone();
        let task_liveness: [TaskLiveness; 2] = Default::default();
        let deps = WatcherDeps {
            node_stats: node.clone(),
            notifications: node.clone(),
            pressures: Arc::new(move |conditions, _| observer.with(|state| state.conditions.push(conditions.clone()))),
            metrics: metrics.clone(),
            restored: Vec::new(),
            liveness: task_liveness[0].clone(),
        };
        let (watcher, pictures) = Watcher::new(config.clone(), deps, began);
        let (events, liveness) = (node.clone(), task_liveness[1].clone());
        let deps = EvictorDeps { pods: node.clone(), reclaim: node.clone(), events, metrics, liveness };
        let evictor = Evictor::new(config, deps, pictures, began);
        tokio::spawn(watcher.run(stop.clone()));
        tokio::spawn(evictor.run(stop.clone()));
        Self { node, registry, task_liveness, stop }
    }

    /// Adds a running pod with that memory usage, in bytes.
    pub fn pod(&self, name: &str, memory: u64, spec: &Value) {
        self.running(name, PodUse { memory: Some(memory), ..PodUse::default() }, spec, Duration::from_millis(100));
    }

    /// Adds a running static pod with that memory usage, in bytes.
    pub fn static_pod(&self, name: &str, memory: u64) {
        let usage = PodUse { memory: Some(memory), ..PodUse::default() };
        let metadata = json!({"name": name, "namespace": "n", "uid": name,
            "annotations": {"kubernetes.io/config.source": "file"}});
        self.put(metadata, usage, &json!({}), Duration::ZERO);
    }

    /// Adds a running pod with that usage, which takes `ends_in` to terminate.
    pub fn running(&self, name: &str, usage: PodUse, spec: &Value, ends_in: Duration) {
        self.put(json!({"name": name, "namespace": "n", "uid": name}), usage, spec, ends_in);
    }

    fn put(&self, metadata: Value, usage: PodUse, spec: &Value, ends_in: Duration) {
        let name = metadata["name"].as_str().expect("a name").to_owned();
        let mut object = json!({"metadata": metadata, "spec": {
            "terminationGracePeriodSeconds": 30, "containers": [{"name": "c"}]}});
        for (key, value) in spec.as_object().expect("an object") {
            object["spec"][key] = value.clone();
        }
        let pod = Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"));
        self.node.with(|state| state.pods.insert(name, RunningPod { pod, usage, ends_in }));
    }

    /// Sets the memory usage outside pods, in bytes.
    pub fn memory_used(&self, bytes: u64) {
        self.node.with(|state| (state.memory_used, state.page_cache) = (bytes, 0));
    }

    /// Like [`Fixture::memory_used`], with `of_files` bytes of it as reclaimable page cache.
    pub fn page_cache(&self, used: u64, of_files: u64) {
        self.node.with(|state| (state.memory_used, state.page_cache) = (used, of_files));
    }

    /// Sets the disk usage: bytes that cannot be removed, and bytes of unused images.
    pub fn disk_used(&self, bytes: u64, images: u64) {
        self.node.with(|state| (state.disk_used, state.images) = (bytes, images));
    }

    /// Adds a separate disk for images and writable layers, with `used` bytes of unused images.
    pub fn images_apart(&self, used: u64) {
        self.node.with(|state| state.image_disk_used = Some(used));
    }

    /// Sets the maximum number of processes, and the number of those outside pods.
    pub fn processes(&self, most: u64, others: u64) {
        self.node.with(|state| state.processes = Some((most, others)));
    }

    /// Sets the duration of the removal of containers.
    pub fn slow_removal(&self, time: Duration) {
        self.node.with(|state| state.removal = time);
    }

    /// Sets the duration of the kernel's page cache reclaim.
    pub fn slow_taking(&self, time: Duration) {
        self.node.with(|state| state.taking = time);
    }

    /// Sets the duration of a disk measurement.
    pub fn slow_measuring(&self, time: Duration) {
        self.node.with(|state| state.measuring = time);
    }

    /// Makes the next request for that scope of pod usage fail.
    pub fn refuses_once(&self, needs: UsageScope) {
        self.node.with(|state| state.refused = Some(needs));
    }

    /// Scopes of pod usage requested since the last call.
    pub fn asked(&self) -> Vec<UsageScope> {
        self.node.with(|state| std::mem::take(&mut state.asked))
    }

    /// Makes reclaimed memory be used for something else immediately.
    pub fn fills(&self) {
        self.node.with(|state| state.fills = true);
    }

    /// Simulates a kernel notification.
    pub fn notify(&self) {
        self.node.kernel_notification.notify_one();
    }

    /// Number of readings of the node.
    pub fn read_count(&self) -> u64 {
        self.node.with(|state| state.read_count)
    }

    /// Makes readings of the node hang from now on.
    pub fn hang(&self) {
        self.node.with(|state| state.hangs = true);
    }

    /// Waits that long; asserts that watcher and evictor report that they are alive.
    pub async fn wait(&self, seconds: f64) {
        tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
        assert_eq!(self.task_liveness.each_ref().map(TaskLiveness::overdue_for), [None, None]);
    }

    /// Actions and events recorded since the last call.
    pub fn take_log(&self) -> Vec<String> {
        self.node.with(|state| std::mem::take(&mut state.log))
    }

    /// Current pressure conditions.
    pub fn conditions(&self) -> Vec<&'static str> {
        let last = self.node.with(|state| state.conditions.last().cloned().unwrap_or_default());
        last.iter().map(|condition| condition.as_str()).collect()
    }

    /// Number of evicted pods of a signal.
    pub fn evicted(&self, signal: &str) -> u64 {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == "kubelet_evictions");
        let series = family.iter().flat_map(|family| family.get_metric());
        let of_signal = series.filter(|series| series.get_label().iter().any(|label| label.value() == signal));
        of_signal.map(|series| series.get_counter().get_value() as u64).sum()
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}
