//! Plugin watcher and CSI plugin against a driver with real sockets and mounts.
//!
//! The driver implements the real contract; the API server's objects are fakes. Needs root for the mounts, otherwise
//! each test reports that it is skipped.

mod failures;
mod registration;
mod sequence;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use berth::plugins::{Handlers, Watcher, WatcherDeps};
use berth_metrics::{CsiMetrics, PluginMetrics, Registry};
use berth_ports::{
    AttachedVolumes, NodeDriver, NodeDrivers, ObjectError, ObjectSource, PluginHandler, PullSecret, StorageError,
    StorageObjects, SystemClock, TokenRequest,
};
use berth_testkit::csi::{CsiDriver, DriverProperties, Plugin};
use berth_types::{Pod, PodUid, api};
use berth_volumes::{
    AttachableVolumePlugin, PodLayout, Removal, Usage, VolumeSpec,
    csi::{Csi, CsiDeps, DriverRegistration, Drivers, DriversDeps},
};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Name of the default driver.
pub const DRIVER: &str = "disk.example.com";
/// Content of a volume.
pub const DATA: &str = "precious";

/// Fake API objects, and the node's recorded drivers.
#[derive(Default)]
pub struct Objects {
    drivers: Mutex<BTreeMap<String, CSIDriver>>,
    attachments: Mutex<BTreeMap<String, VolumeAttachment>>,
    secrets: Mutex<BTreeMap<String, BTreeMap<String, Vec<u8>>>>,
    on_node: Mutex<BTreeMap<String, NodeDriver>>,
    refusal: Mutex<Option<String>>,
    moved: watch::Sender<u64>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Objects {
    /// Adds a CSIDriver, with the fields that a server defaults.
    pub fn driver(&self, name: &str, spec: Value) {
        let mut object = json!({"metadata": {"name": name}, "spec": {"volumeLifecycleModes": ["Persistent"]}});
        merge(&mut object["spec"], spec);
        lock(&self.drivers).insert(name.to_owned(), serde_json::from_value(object).expect("a driver"));
        self.moved.send_modify(|times| *times += 1);
    }

    /// Adds a VolumeAttachment.
    pub fn attachment(&self, name: &str, status: Value) {
        let object = json!({"metadata": {"name": name}, "status": status,
            "spec": {"attacher": DRIVER, "nodeName": "n", "source": {}}});
        lock(&self.attachments).insert(name.to_owned(), serde_json::from_value(object).expect("an attachment"));
    }

    /// Adds a secret with one key.
    pub fn secret(&self, name: &str, key: &str, value: &str) {
        let data = BTreeMap::from([(key.to_owned(), value.as_bytes().to_vec())]);
        lock(&self.secrets).insert(name.to_owned(), data);
    }

    /// The driver entry recorded for the node.
    pub fn on_node(&self, name: &str) -> Option<NodeDriver> {
        lock(&self.on_node).get(name).cloned()
    }

    /// Makes writes to the node's objects fail, or succeed again.
    pub fn refuse(&self, why: Option<&str>) {
        *lock(&self.refusal) = why.map(str::to_owned);
    }

    fn written(&self) -> Result<(), String> {
        lock(&self.refusal).clone().map_or(Ok(()), Err)
    }
}

#[async_trait]
impl NodeDrivers for Objects {
    async fn install(&self, driver: &NodeDriver) -> Result<(), String> {
        self.written()?;
        lock(&self.on_node).insert(driver.name.clone(), driver.clone());
        Ok(())
    }

    async fn update(&self, driver: &NodeDriver) -> Result<(), String> {
        self.install(driver).await
    }

    async fn uninstall(&self, name: &str) -> Result<(), String> {
        self.written()?;
        lock(&self.on_node).remove(name);
        Ok(())
    }
}

fn missing(what: &str) -> StorageError {
    StorageError::NotFound(format!("{what} not found"))
}

#[async_trait]
impl StorageObjects for Objects {
    async fn claim(&self, _: &str, name: &str) -> Result<Arc<api::PersistentVolumeClaim>, StorageError> {
        Err(missing(name))
    }

    async fn volume(&self, name: &str) -> Result<Arc<api::PersistentVolume>, StorageError> {
        Err(missing(name))
    }

    async fn attachment(&self, name: &str) -> Result<Arc<VolumeAttachment>, StorageError> {
        lock(&self.attachments).get(name).cloned().map(Arc::new).ok_or_else(|| missing(name))
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<BTreeMap<String, Vec<u8>>, StorageError> {
        assert_eq!(namespace, "ns");
        lock(&self.secrets).get(name).cloned().ok_or_else(|| missing(name))
    }

    async fn driver(&self, name: &str) -> Result<Option<Arc<CSIDriver>>, StorageError> {
        Ok(lock(&self.drivers).get(name).cloned().map(Arc::new))
    }

    async fn patch_claim(&self, _: &str, name: &str, _: String) -> Result<(), StorageError> {
        Err(missing(name))
    }

    fn attached(&self) -> watch::Receiver<AttachedVolumes> {
        watch::channel(None).1
    }

    fn retry_signal(&self) -> watch::Receiver<u64> {
        self.moved.subscribe()
    }
}

#[async_trait]
impl ObjectSource for Objects {
    async fn config_map(&self, _: &str, name: &str) -> Result<Arc<BTreeMap<String, String>>, ObjectError> {
        Err(ObjectError::Other(name.to_owned()))
    }

    async fn secret(&self, _: &str, name: &str) -> Result<Arc<BTreeMap<String, Vec<u8>>>, ObjectError> {
        Err(ObjectError::Other(format!("{name}: drivers' secrets are never from a cache")))
    }

    fn services(&self, _: &str) -> Option<Vec<Arc<api::Service>>> {
        None
    }

    async fn runtime_handler(&self, _: Option<&str>) -> Result<String, ObjectError> {
        Ok(String::new())
    }

    async fn pull_secrets(&self, _: &Pod) -> (Vec<PullSecret>, Vec<String>) {
        (Vec::new(), Vec::new())
    }

    async fn token(&self, pod: &Pod, ask: &TokenRequest) -> Result<String, ObjectError> {
        Ok(format!("token of {} for {}", pod.name(), ask.audience))
    }
}

/// A node without its agent: root directory, fake objects, registry, and CSI plugin.
pub struct Fixture {
    /// The agent's root directory.
    pub root: PathBuf,
    /// Directory of the driver's volumes.
    pub data: PathBuf,
    /// Fake API objects.
    pub objects: Arc<Objects>,
    /// Registry of CSI drivers.
    pub drivers: Arc<Drivers>,
    /// The CSI volume plugin.
    pub csi: Csi,
    /// Metrics registry.
    pub registry: Registry,
    tasks: TaskTracker,
    stop: CancellationToken,
    _folder: Folder,
}

struct Folder(tempfile::TempDir);

impl Drop for Folder {
    fn drop(&mut self) {
        berth_testkit::process::unmount_below(self.0.path());
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.stop.cancel();
        self.tasks.close();
        // A watcher recreates its directory when it is removed, and would leave it behind.
        let until = std::time::Instant::now() + Duration::from_secs(60);
        while !self.tasks.is_empty() && std::time::Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Fixture {
    /// Creates a world without any driver.
    pub fn open() -> Self {
        let folder = tempfile::Builder::new().prefix("berth-csi-").tempdir().expect("a folder");
        let (root, data) = (folder.path().join("root"), folder.path().join("data"));
        fs::create_dir(&root).expect("a directory");
        let (objects, registry) = (Arc::new(Objects::default()), Registry::new());
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let drivers = Drivers::new(DriversDeps {
            node: objects.clone(),
            objects: objects.clone(),
            metrics: CsiMetrics::new(&registry),
            tasks: tasks.clone(),
            stop: stop.clone(),
        });
        let csi = csi(&root, &drivers, &objects);
        Self { root, data, objects, drivers, csi, registry, tasks, stop, _folder: Folder(folder) }
    }

    /// Starts the plugin watcher.
    pub fn watch(&self) {
        let handler: Arc<dyn PluginHandler> = Arc::new(DriverRegistration(self.drivers.clone()));
        let handlers: Handlers = Arc::new(BTreeMap::from([("CSIPlugin", handler)]));
        let watcher = Watcher::new(WatcherDeps {
            directory: self.plugins(),
            handlers,
            metrics: PluginMetrics::new(&self.registry),
            tasks: self.tasks.clone(),
        });
        self.tasks.spawn(watcher.run(self.stop.clone()));
    }

    /// Directory in which plugins register.
    pub fn plugins(&self) -> PathBuf {
        self.root.join("plugins_registry")
    }

    /// Path of a registration socket.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.plugins().join(format!("{name}-reg.sock"))
    }

    /// Creates a world with a registered driver that needs no attachment.
    pub async fn with_driver() -> (Self, CsiDriver, Plugin) {
        let world = Self::open();
        world.objects.driver(DRIVER, json!({"attachRequired": false, "fsGroupPolicy": "File"}));
        let (driver, plugin) = world.register(DriverProperties::of(DRIVER)).await;
        (world, driver, plugin)
    }

    /// Starts a driver, and waits until it is registered.
    pub async fn register(&self, nature: DriverProperties) -> (CsiDriver, Plugin) {
        self.watch();
        let name = nature.name.clone();
        let driver = CsiDriver::start(nature, &self.root, &self.data).await;
        let plugin = Plugin::csi(&self.socket(&name), &name, &driver.endpoint, &["1.9.0"]);
        plugin.registered().await;
        (driver, plugin)
    }

    /// A pod's use of a persistent volume.
    pub fn usage(&self, pod: &str, volume: Value) -> Usage {
        let mut object = json!({"metadata": {"name": "pv"}, "spec": {"accessModes": ["ReadWriteOnce"],
            "csi": {"driver": DRIVER, "volumeHandle": "h"}}});
        merge(&mut object["spec"], volume);
        let volume = serde_json::from_value(object).expect("a volume");
        let spec = VolumeSpec::persistent(Arc::new(volume), Arc::default(), false);
        self.usage_of(pod, spec)
    }

    /// A pod's use of an inline CSI volume.
    pub fn inline(&self, pod: &str, csi: Value) -> Usage {
        let volume = serde_json::from_value(json!({"name": "v", "csi": csi})).expect("a volume");
        self.usage_of(pod, VolumeSpec::inline(&volume))
    }

    fn usage_of(&self, name: &str, spec: VolumeSpec) -> Usage {
        let pod = json!({"metadata": {"name": name, "namespace": "ns", "uid": format!("uid-{name}")},
            "spec": {"serviceAccountName": "robot", "containers": []}});
        let pod = Arc::new(Pod::new(serde_json::from_value(pod).expect("a pod")).expect("complete"));
        let layout = PodLayout::new(&self.root, pod.uid()).expect("a good UID");
        let target = layout.pod().join("volumes/kubernetes.io~csi").join(&spec.name);
        Usage {
            unique: berth_volumes::UniqueName::shared("kubernetes.io/csi", &spec.name),
            mode: spec.mode(),
            pod,
            spec: Arc::new(spec),
            layout,
            target,
            device: String::new(),
            group: None,
            user: None,
            label: None,
            has_other_users: false,
            is_republish: false,
            was_rebuilt: false,
            operation: berth_volumes::Operation::default(),
        }
    }

    /// Mounts below the agent's root.
    pub fn mounts(&self) -> Vec<PathBuf> {
        berth_testkit::csi::mounts_below(&self.root)
    }

    /// Files and directories of CSI volumes, global and per pod.
    pub fn left(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for directory in [self.root.join("plugins/kubernetes.io/csi"), self.root.join("pods")] {
            walk(&directory, &mut found);
        }
        let is_volume = |path: &PathBuf| {
            let text = path.display().to_string();
            text.ends_with("vol_data.json") || text.ends_with("globalmount") || text.ends_with("/mount")
        };
        found.retain(is_volume);
        found
    }
}

/// The CSI plugin as created by a new agent.
pub fn csi(root: &Path, drivers: &Arc<Drivers>, objects: &Arc<Objects>) -> Csi {
    let deps = CsiDeps {
        drivers: drivers.clone(),
        objects: objects.clone(),
        tokens: objects.clone(),
        clock: Arc::new(SystemClock),
        asks_health: true,
    };
    Csi::new(root, "n", deps)
}

fn walk(directory: &Path, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.map(|entry| entry.expect("an entry")) {
        found.push(entry.path());
        if entry.file_type().expect("a type").is_dir() {
            walk(&entry.path(), found);
        }
    }
}

fn merge(object: &mut Value, changes: Value) {
    match (object, changes) {
        (Value::Object(object), Value::Object(changes)) => {
            for (key, value) in changes {
                merge(object.entry(key).or_insert(Value::Null), value);
            }
        }
        (object, changes) => *object = changes,
    }
}

/// Removal that matches a usage.
pub fn removal(usage: &Usage) -> Removal {
    Removal {
        spec: usage.spec.clone(),
        unique: usage.unique.clone(),
        mode: usage.mode,
        pod: Some((usage.pod.uid().clone(), usage.target.clone())),
        device: String::new(),
        operation: berth_volumes::Operation::default(),
    }
}

/// Removal that matches a staged volume.
pub fn staged(usage: &Usage) -> Removal {
    Removal { pod: None, ..removal(usage) }
}

/// Stages and publishes.
pub async fn mount(csi: &Csi, usage: &Usage) -> PathBuf {
    csi.stage(usage).await.expect("staged");
    csi.publish(usage).await.expect("published").path
}

/// Unpublishes and unstages.
pub async fn unmount(csi: &Csi, usage: &Usage) {
    csi.unpublish(&removal(usage)).await.expect("unpublished");
    csi.unstage(&staged(usage)).await.expect("unstaged");
}

/// UID of a pod in these tests.
pub fn uid(pod: &str) -> PodUid {
    format!("uid-{pod}").as_str().into()
}

/// Pause in which nothing may happen.
pub async fn a_moment() {
    tokio::time::sleep(Duration::from_millis(300)).await;
}
