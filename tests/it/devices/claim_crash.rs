//! Crashes of the agent between any two steps of preparing and releasing a claim (spec 06c §3.2-3.5).

use std::{
    collections::{BTreeMap, HashSet},
    fs,
    path::PathBuf,
    sync::Arc,
};

use async_trait::async_trait;
use k8s_openapi::api::{
    resource::v1::ResourceClaim,
    storage::v1::{CSIDriver, VolumeAttachment},
};
use serde_json::json;
use tempfile::TempDir;
use tokio::{sync::watch, time::timeout};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use berth_metrics::{DraMetrics, Registry};
use berth_ports::{AttachedVolumes, PluginHandler, PluginInfo, PodClaims, StorageError, StorageObjects};
use berth_resources::dra::{
    DeviceReport, DraManager, DraManagerDeps, DriverRegistration, Drivers, DriversDeps, PodClaimPreparer, checkpoint,
};
use berth_testkit::{
    dra_driver::{DriverMethod, SampleDriver, V1, claim_object},
    port_fakes::MemoryFile,
};
use berth_types::{Pod, api};

use super::fixture::{EVER, RecordedFile, pod_of};

const DRIVER: &str = "gpu.example.com";
const CLAIM_UID: &str = "claim-uid";
const PREPARE: DriverMethod = DriverMethod::NodePrepareResources;
const UNPREPARE: DriverMethod = DriverMethod::NodeUnprepareResources;

/// API objects: one ResourceClaim.
struct OneClaim(Arc<ResourceClaim>);

#[async_trait]
impl StorageObjects for OneClaim {
    async fn claim(&self, _: &str, _: &str) -> Result<Arc<api::PersistentVolumeClaim>, StorageError> {
        Err(StorageError::NoClient)
    }

    async fn resource_claim(&self, _: &str, _: &str) -> Result<Arc<ResourceClaim>, StorageError> {
        Ok(self.0.clone())
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

/// A driver, and a pod with one of its claims. The driver's state is a CDI spec file per prepared claim.
struct ClaimNode {
    directory: TempDir,
    driver: SampleDriver,
    claim: Arc<ResourceClaim>,
    pod: Arc<Pod>,
}

/// A DRA manager whose driver is registered.
struct ClaimAgent {
    claims: PodClaimPreparer,
    tasks: TaskTracker,
    shutdown: CancellationToken,
}

impl ClaimNode {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let driver = SampleDriver::start(directory.path(), DRIVER, &[V1]);
        driver.set_cdi_directory(&directory.path().join("cdi"));
        let main = json!({"name": "c", "resources": {"claims": [{"name": "gpu"}]}});
        let claims = json!([{"name": "gpu", "resourceClaimName": "one"}]);
        let pod = pod_of("web", json!({"resourceClaims": claims, "containers": [main]}));
        let reserved_for = Some((pod.name(), pod.uid().as_str()));
        let claim = claim_object(pod.namespace(), "one", CLAIM_UID, DRIVER, reserved_for, &["gpu"]);
        let claim = Arc::new(serde_json::from_value(claim).expect("a claim"));
        Self { directory, driver, claim, pod }
    }

    /// Starts an agent with this checkpoint.
    async fn start(&self, file: Arc<RecordedFile>) -> ClaimAgent {
        let (tasks, shutdown) = (TaskTracker::new(), CancellationToken::new());
        let metrics = DraMetrics::new(&Registry::default());
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
            objects: Arc::new(OneClaim(self.claim.clone())),
            drivers: drivers.clone(),
            metrics,
            reports_messages: false,
            on_health_change: Box::new(|_| ()),
            tasks: tasks.clone(),
            shutdown: shutdown.clone(),
        });
        let manager = manager.await.expect("a valid checkpoint");
        let plugin = PluginInfo {
            kind: "DRAPlugin".to_owned(),
            name: DRIVER.to_owned(),
            endpoint: self.driver.socket.clone(),
            versions: vec![V1.to_owned()],
            socket: self.driver.socket.clone(),
        };
        DriverRegistration(drivers).register(&plugin).await.expect("registered");
        ClaimAgent { claims: PodClaimPreparer(manager), tasks, shutdown }
    }

    /// CDI spec files of prepared claims.
    fn specs(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.directory.path().join("cdi")).expect("a directory");
        entries.map(|entry| entry.expect("an entry").path()).collect()
    }

    /// Number of calls of a method of the driver.
    fn count(&self, method: DriverMethod) -> usize {
        self.driver.calls().iter().filter(|call| call.method == method).count()
    }
}

impl ClaimAgent {
    /// CDI devices of the pod's container.
    fn cdi_devices(&self, pod: &Pod) -> Result<Vec<String>, String> {
        let (_, container) = pod.container("c").expect("a container of the pod");
        self.claims.cdi_devices(pod, container)
    }

    async fn stop(self) {
        self.shutdown.cancel();
        self.tasks.close();
        timeout(EVER, self.tasks.wait()).await.expect("all tasks end");
    }
}

/// Number of claims in a checkpoint.
fn claims_in(content: Option<&Vec<u8>>) -> usize {
    content.map_or(0, |content| checkpoint::decode(content).expect("a valid checkpoint").len())
}

/// The agent may be killed between any two steps. If the pod is still there, its claim is prepared with one call, and
/// its devices are not doubled; if it is not, the claim is released. In the end nothing is left, also at the driver.
#[tokio::test]
async fn a_crash_between_any_two_steps_of_a_claim_leaves_nothing_prepared() {
    // AC-06c-22
    let node = ClaimNode::new();
    let file = RecordedFile::containing(None);
    let agent = node.start(file.clone()).await;
    agent.claims.prepare(&node.pod).await.expect("the driver works");
    let [spec]: [PathBuf; 1] = node.specs().try_into().expect("the driver has prepared one claim");
    let spec_text = fs::read(&spec).expect("readable");
    agent.claims.unprepare(node.pod.uid()).await.expect("the driver works");
    agent.stop().await;
    let contents = file.contents();
    let [begun, prepared, released] = contents.as_slice() else {
        panic!("{} writes: expected two by the preparation, and one by the release", contents.len())
    };

    for (when, content, is_prepared) in [
        ("before the first write", None, false),
        ("between the first write and the preparation", Some(begun), false),
        ("between the preparation and its write", Some(begun), true),
        ("after the write of the devices", Some(prepared), true),
        ("between the release by the driver and its write", Some(prepared), false),
        ("after the last write", Some(released), false),
    ] {
        for is_pod_gone in [false, true] {
            if is_prepared {
                fs::write(&spec, &spec_text).expect("written");
            }
            assert_eq!(node.specs().len(), usize::from(is_prepared), "{when}");
            let (prepares, unprepares) = (node.count(PREPARE), node.count(UNPREPARE));
            let file = RecordedFile::containing(content);
            let agent = node.start(file.clone()).await;
            if is_pod_gone {
                agent.claims.reconcile(&HashSet::new());
            } else {
                // The second time the claim is known to be prepared.
                for _ in 0..2 {
                    agent.claims.prepare(&node.pod).await.expect(when);
                }
                let device = format!("{}={CLAIM_UID}", node.driver.cdi_kind());
                assert_eq!(agent.cdi_devices(&node.pod), Ok(vec![device]), "{when}");
                assert_eq!(node.specs(), [spec.as_path()], "{when}");
                agent.claims.unprepare(node.pod.uid()).await.expect(when);
            }
            file.until(&format!("no claim is left after a crash {when}"), |content| claims_in(content) == 0).await;
            assert_eq!(node.specs(), [] as [PathBuf; 0], "{when}: the driver has released the claim");
            let expected = if is_pod_gone { (0, claims_in(content)) } else { (1, 1) };
            let calls = (node.count(PREPARE) - prepares, node.count(UNPREPARE) - unprepares);
            assert_eq!(calls, expected, "{when}: calls to prepare and to release");
            agent.stop().await;
        }
    }
}
