//! Fixture: a DRA manager with a sample driver on a real socket, and ResourceClaims in memory.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::PathBuf,
    sync::Arc,
};

use async_trait::async_trait;
use k8s_openapi::api::{
    resource::v1::ResourceClaim,
    storage::v1::{CSIDriver, VolumeAttachment},
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{sync::watch, time::timeout};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use berth_metrics::{DraMetrics, Registry};
use berth_ports::{AttachedVolumes, PluginHandler, PluginInfo, PodClaims, StorageError, StorageObjects};
use berth_resources::dra::{
    DeviceReport, DraManager, DraManagerDeps, DriverRegistration, Drivers, DriversDeps, PodClaimPreparer,
};
use berth_testkit::{
    dra_driver::{DriverMethod, SampleDriver, claim_object},
    port_fakes::MemoryFile,
};
use berth_types::{Pod, api};

use super::fixture::{EVER, RecordedFile, pod_of};

pub const DRIVER: &str = "gpu.example.com";
pub const PREPARE: DriverMethod = DriverMethod::NodePrepareResources;
pub const UNPREPARE: DriverMethod = DriverMethod::NodeUnprepareResources;

/// API objects: ResourceClaims by name.
struct ClaimObjects(HashMap<String, Arc<ResourceClaim>>);

#[async_trait]
impl StorageObjects for ClaimObjects {
    async fn claim(&self, _: &str, _: &str) -> Result<Arc<api::PersistentVolumeClaim>, StorageError> {
        Err(StorageError::NoClient)
    }

    async fn resource_claim(&self, _: &str, name: &str) -> Result<Arc<ResourceClaim>, StorageError> {
        self.0.get(name).cloned().ok_or_else(|| StorageError::NotFound(format!("{name} not found")))
    }

    async fn volume(&self, _: &str) -> Result<Arc<api::PersistentVolume>, StorageError> {
        Err(StorageError::NoClient)
    }

    async fn attachment(&self, _: &str) -> Result<Arc<VolumeAttachment>, StorageError> {
        Err(StorageError::NoClient)
    }

    async fn secret(&self, _: &str, _: &str) -> Result<BTreeMap<String, Vec<u8>>, StorageError> {
        Err(StorageError::NoClient)
    }

    async fn driver(&self, _: &str) -> Result<Option<Arc<CSIDriver>>, StorageError> {
        Err(StorageError::NoClient)
    }

    async fn patch_claim(&self, _: &str, _: &str, _: String) -> Result<(), StorageError> {
        Err(StorageError::NoClient)
    }

    fn attached(&self) -> watch::Receiver<AttachedVolumes> {
        watch::channel(None).1
    }

    fn retry_signal(&self) -> watch::Receiver<u64> {
        watch::channel(0).1
    }
}

/// A driver, and a pod with claims of it. The driver's state is a CDI spec file per prepared claim.
pub struct ClaimNode {
    pub directory: TempDir,
    pub driver: SampleDriver,
    /// Its container `c` uses all claims.
    pub pod: Arc<Pod>,
    claims: HashMap<String, Arc<ResourceClaim>>,
}

/// A DRA manager whose driver is registered.
pub struct ClaimAgent {
    pub claims: PodClaimPreparer,
    /// Metrics of DRA.
    pub registry: Registry,
    drivers: Arc<Drivers>,
    tasks: TaskTracker,
    shutdown: CancellationToken,
}

impl ClaimNode {
    /// A driver with these services, and a pod with claims of these names.
    pub fn new(services: &[&str], claims: &[&str]) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let driver = SampleDriver::start(directory.path(), DRIVER, services);
        driver.set_cdi_directory(&directory.path().join("cdi"));
        let used: Vec<Value> = claims.iter().map(|name| json!({"name": name})).collect();
        let entries: Vec<Value> = claims.iter().map(|name| json!({"name": name, "resourceClaimName": name})).collect();
        let main = json!({"name": "c", "resources": {"claims": used}});
        let pod = pod_of("web", json!({"resourceClaims": entries, "containers": [main]}));
        let claim = |name: &&str| {
            let reserved_for = Some((pod.name(), pod.uid().as_str()));
            let object = claim_object(pod.namespace(), name, &uid_of(name), DRIVER, reserved_for, &["gpu"]);
            ((*name).to_owned(), Arc::new(serde_json::from_value(object).expect("a claim")))
        };
        let claims = claims.iter().map(claim).collect();
        Self { directory, driver, pod, claims }
    }

    /// Starts an agent with this checkpoint.
    pub async fn start(&self, file: Arc<RecordedFile>) -> ClaimAgent {
        let (tasks, shutdown) = (TaskTracker::new(), CancellationToken::new());
        let registry = Registry::default();
        let metrics = DraMetrics::new(&registry);
        let drivers = Drivers::new(DriversDeps {
            tasks: tasks.clone(),
            shutdown: shutdown.clone(),
            metrics: metrics.clone(),
            on_health: Arc::new(|_: &str, _: Option<Vec<DeviceReport>>| {}),
            on_gone: Arc::new(|_: String| {}),
        });
        let manager = DraManager::open(DraManagerDeps {
            file,
            health_file: Arc::new(MemoryFile::default()),
            objects: Arc::new(ClaimObjects(self.claims.clone())),
            drivers: drivers.clone(),
            metrics,
            reports_messages: false,
            on_health_change: Box::new(|_| ()),
            tasks: tasks.clone(),
            shutdown: shutdown.clone(),
        });
        let claims = PodClaimPreparer(manager.await.expect("a valid checkpoint"));
        let agent = ClaimAgent { claims, registry, drivers, tasks, shutdown };
        agent.register(&self.driver).await;
        agent
    }

    /// CDI spec files of prepared claims.
    pub fn specs(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.directory.path().join("cdi")).expect("a directory");
        entries.map(|entry| entry.expect("an entry").path()).collect()
    }

    /// CDI ID of the device that the driver prepares for a claim.
    pub fn cdi_id(&self, claim: &str) -> String {
        format!("{}={}", self.driver.cdi_kind(), uid_of(claim))
    }
}

impl ClaimAgent {
    /// Registers an endpoint of the driver.
    pub async fn register(&self, driver: &SampleDriver) {
        let plugin = PluginInfo {
            kind: "DRAPlugin".to_owned(),
            name: driver.name.clone(),
            endpoint: driver.socket.clone(),
            versions: driver.services.clone(),
            socket: driver.socket.clone(),
        };
        DriverRegistration(self.drivers.clone()).register(&plugin).await.expect("registered");
    }

    /// CDI devices of the pod's container.
    pub fn cdi_devices(&self, pod: &Pod) -> Result<Vec<String>, String> {
        let (_, container) = pod.container("c").expect("a container of the pod");
        self.claims.cdi_devices(pod, container)
    }

    pub async fn stop(self) {
        self.shutdown.cancel();
        self.tasks.close();
        timeout(EVER, self.tasks.wait()).await.expect("all tasks end");
    }
}

/// UID of the claim of that name.
pub fn uid_of(claim: &str) -> String {
    format!("uid-{claim}")
}

/// Number of calls of a method of a driver.
pub fn calls(driver: &SampleDriver, method: DriverMethod) -> usize {
    driver.calls().iter().filter(|call| call.method == method).count()
}
