//! Fixture: a device manager with its registration server, sample plugins on real sockets, a recorded checkpoint.

use std::{
    collections::{BTreeMap, HashSet},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{sync::watch, time::timeout};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use berth_metrics::{DeviceMetrics, Registry};
use berth_ports::{ContainerDevices, DeviceAdmission, DiskStateFile, PodDevices, StateFile};
use berth_proto::device_plugin::{Device, DevicePluginOptions};
use berth_resources::{
    devices::{
        DeviceManager, DeviceManagerConfig, DeviceManagerDeps, PluginRegistry, PodDeviceAllocator,
        alignment::{NoAlignment, ResourceAlignment},
        serve_registration,
    },
    numa::NumaMask,
};
use berth_testkit::device_plugin::{PluginMethod, SamplePlugin};
use berth_types::{Pod, PodUid};

/// Resource of most tests.
pub const GPU: &str = "example.com/gpu";
/// Timeout of steps that must happen.
pub const EVER: Duration = Duration::from_secs(30);

/// A directory of device plugins on this machine; managers are opened and closed in it.
pub struct Node {
    pub directory: TempDir,
}

/// A device manager with its registration server.
pub struct Agent {
    pub manager: Arc<DeviceManager>,
    pub devices: PodDeviceAllocator,
    /// Pods whose health changes were reported.
    pub changed: Arc<Mutex<Vec<PodUid>>>,
    /// Metrics of device plugins.
    pub registry: Registry,
    /// Registration socket.
    pub socket: PathBuf,
    tasks: TaskTracker,
    shutdown: CancellationToken,
}

impl Node {
    pub fn new() -> Self {
        Self { directory: tempfile::tempdir().expect("a directory") }
    }

    pub async fn start(&self) -> Agent {
        self.start_waiting(EVER).await
    }

    /// Path of the checkpoint.
    pub fn checkpoint(&self) -> PathBuf {
        self.directory.path().join("kubelet_internal_checkpoint")
    }

    pub async fn start_waiting(&self, registration_wait: Duration) -> Agent {
        self.start_with(Arc::new(DiskStateFile::new(self.checkpoint())), registration_wait).await
    }

    /// Starts an agent with another checkpoint file.
    pub async fn start_with(&self, file: Arc<dyn StateFile>, registration_wait: Duration) -> Agent {
        self.start_aligned(file, registration_wait, Arc::new(NoAlignment)).await
    }

    /// Starts an agent on a machine with two NUMA nodes that aligns CPUs, memory, and devices.
    pub async fn start_aligned(
        &self,
        file: Arc<dyn StateFile>,
        registration_wait: Duration,
        alignment: Arc<dyn ResourceAlignment>,
    ) -> Agent {
        let (tasks, shutdown) = (TaskTracker::new(), CancellationToken::new());
        let changed = Arc::<Mutex<Vec<PodUid>>>::default();
        let (recorder, registry) = (changed.clone(), Registry::default());
        let directory = self.directory.path().to_owned();
        // That of the agent before.
        let _ = std::fs::remove_file(directory.join("kubelet.sock"));
        let deps = DeviceManagerDeps {
            file,
            metrics: DeviceMetrics::new(&registry),
            on_health_change: Box::new(move |pods| recorder.lock().expect("whole").extend(pods)),
            alignment,
            numa_nodes: NumaMask::from_bits(0b11),
            tasks: tasks.clone(),
            shutdown: shutdown.clone(),
        };
        let config = DeviceManagerConfig { directory: directory.clone(), registration_wait };
        let manager = DeviceManager::open(config, deps).await;
        let plugins = Arc::new(PluginRegistry(manager.clone()));
        let (_, server) = serve_registration(directory.clone(), plugins, shutdown.clone());
        tasks.spawn(server);
        let socket = directory.join("kubelet.sock");
        let devices = PodDeviceAllocator(manager.clone());
        let agent = Agent { devices, manager, changed, registry, socket, tasks, shutdown };
        agent.until("the registration socket", |agent| agent.socket.exists()).await;
        agent
    }

    /// Starts an agent, and a plugin that has registered these devices.
    pub async fn start_with_devices(&self, devices: Vec<Device>) -> (SamplePlugin, Agent) {
        let mut plugin = self.plugin(GPU, no_options());
        let is_healthy = |device: &&Device| device.health == "Healthy";
        let allocatable = u64::try_from(devices.iter().filter(is_healthy).count()).expect("a small number");
        let capacity = u64::try_from(devices.len()).expect("a small number");
        plugin.set_devices(devices);
        let agent = self.start().await;
        agent.register(&mut plugin).await;
        agent.until_capacity(GPU, (capacity, allocatable)).await;
        (plugin, agent)
    }

    pub fn plugin(&self, resource: &str, options: DevicePluginOptions) -> SamplePlugin {
        let name = format!("{}.sock", resource.replace('/', "-"));
        SamplePlugin::start(self.directory.path(), &name, resource, options)
    }
}

impl Agent {
    /// Waits for a state that no event reports to this test.
    pub async fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let polling = async {
            while !holds(self) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(EVER, polling).await.unwrap_or_else(|_| panic!("not within {EVER:?}: {what}"));
    }

    pub async fn until_capacity(&self, resource: &str, expected: (u64, u64)) {
        let mut capacity = self.manager.capacity();
        let reached = capacity
            .wait_for(|all| all.get(resource).is_some_and(|found| (found.capacity, found.allocatable) == expected));
        let reached = timeout(EVER, reached).await.map(drop);
        assert!(reached.is_ok(), "{resource} is {:?}, expected {expected:?}", self.manager.capacity().borrow());
    }

    /// Registers a plugin, which listens again first where the start of the agent has removed its socket.
    pub async fn register(&self, plugin: &mut SamplePlugin) {
        if !plugin.socket.exists() {
            plugin.restart();
        }
        plugin.register(&self.socket).await.expect("registered");
    }

    /// Admits a pod, waiting for its allocation.
    pub async fn admit(&self, pod: &Arc<Pod>, active: &[&Arc<Pod>]) -> Result<(), String> {
        let uids: HashSet<PodUid> = active.iter().map(|pod| pod.uid().clone()).collect();
        loop {
            match self.devices.admit(pod, false, &|| Some(uids.clone())) {
                DeviceAdmission::Allocated => return Ok(()),
                DeviceAdmission::Rejected(refusal) => return Err(refusal.message),
                DeviceAdmission::Pending(_) => {
                    // Tests that let deadlines pass advance the clock meanwhile.
                    timeout(EVER * 4, self.devices.settled(pod.uid())).await.expect("an allocation ends");
                }
            }
        }
    }

    pub async fn options(&self, pod: &Arc<Pod>, container: &str) -> Result<ContainerDevices, String> {
        let (_, container) = pod.container(container).expect("a container of the pod");
        self.devices.container_devices(pod, container).await
    }

    pub fn ids(&self, pod: &Pod, container: &str) -> Vec<String> {
        self.manager.devices_of(pod.uid(), container).into_iter().map(|device| device.id).collect()
    }

    /// ID and health of each device of the container `c`, as the pod status lists them.
    pub fn health(&self, pod: &Pod) -> Vec<(String, String)> {
        let statuses = self.devices.health(pod.uid(), "c");
        let resources = statuses.into_iter().flat_map(|status| status.resources.unwrap_or_default());
        resources.map(|resource| (resource.resource_id, resource.health.unwrap_or_default())).collect()
    }

    /// Pod UID, container, resource, and ID of each assigned device.
    pub fn owners(&self) -> Vec<[String; 4]> {
        let owners = self.manager.assignments().into_iter();
        owners.map(|owner| [owner.pod.to_string(), owner.container, owner.resource, owner.id.to_string()]).collect()
    }

    pub async fn stop(self) {
        self.shutdown.cancel();
        self.tasks.close();
        timeout(EVER, self.tasks.wait()).await.expect("all tasks end");
    }
}

/// Checkpoint in memory that keeps every content that was written.
pub struct RecordedFile(watch::Sender<Vec<Vec<u8>>>);

impl RecordedFile {
    pub fn containing(content: Option<&Vec<u8>>) -> Arc<Self> {
        Arc::new(Self(watch::Sender::new(content.into_iter().cloned().collect())))
    }

    /// All contents, the newest last.
    pub fn contents(&self) -> Vec<Vec<u8>> {
        self.0.borrow().clone()
    }

    /// Waits for a content; `None` if nothing was written.
    pub async fn until(&self, what: &str, holds: impl Fn(Option<&Vec<u8>>) -> bool) {
        let mut contents = self.0.subscribe();
        let reached = timeout(EVER, contents.wait_for(|contents| holds(contents.last()))).await;
        assert!(reached.is_ok(), "not within {EVER:?}: {what}");
    }
}

#[async_trait]
impl StateFile for RecordedFile {
    fn path(&self) -> &Path {
        Path::new("/in/memory")
    }

    async fn read(&self) -> io::Result<Option<Vec<u8>>> {
        Ok(self.0.borrow().last().cloned())
    }

    async fn replace(&self, content: Vec<u8>) -> io::Result<()> {
        self.0.send_modify(|contents| contents.push(content));
        Ok(())
    }
}

pub fn container(name: &str, limits: &[(&str, u64)]) -> Value {
    let limits: BTreeMap<&str, String> = limits.iter().map(|(name, number)| (*name, number.to_string())).collect();
    json!({"name": name, "resources": {"limits": limits}})
}

pub fn pod_of(name: &str, spec: Value) -> Arc<Pod> {
    let object = json!({"metadata": {"name": name, "namespace": "n", "uid": name}, "spec": spec});
    Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"))
}

pub fn pod(name: &str, number: u64) -> Arc<Pod> {
    pod_of(name, json!({"containers": [container("c", &[(GPU, number)])]}))
}

pub fn no_options() -> DevicePluginOptions {
    DevicePluginOptions::default()
}

/// Advances the clock. Not paused any longer than that: a paused clock advances by itself while the sockets are idle.
pub async fn pass(duration: Duration) {
    tokio::time::pause();
    tokio::time::advance(duration).await;
    tokio::time::resume();
}

/// Series of a family: values of the labels in the order of their names, and the value, or the number of observations.
pub fn series(registry: &Registry, family: &str) -> BTreeMap<Vec<String>, f64> {
    let families = registry.gather().into_iter().filter(|found| found.name() == family);
    let metrics = families.flat_map(|found| found.get_metric().to_vec());
    let value = |metric: &prometheus::proto::Metric| {
        let observations = f64::from(u32::try_from(metric.get_histogram().get_sample_count()).expect("a small number"));
        metric.get_counter().get_value() + metric.get_gauge().get_value() + observations
    };
    let labels = |metric: &prometheus::proto::Metric| {
        metric.get_label().iter().map(|label| label.value().to_owned()).collect::<Vec<String>>()
    };
    metrics.map(|metric| (labels(&metric), value(&metric))).collect()
}

/// Number of calls of a method.
pub fn count(plugin: &SamplePlugin, method: PluginMethod) -> usize {
    plugin.calls().iter().filter(|call| call.method() == method).count()
}
