//! NFS volumes of a healthy server, of one with stale exports, and of an unreachable one.
//!
//! Covers spec 07 §7.7, §14 "corrupted mount errnos" and §17 "hung NFS".

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::PermissionsExt,
    panic::AssertUnwindSafe,
    path::{Path, PathBuf},
    pin::Pin,
    process::Command,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use berth_metrics::{Registry, VolumeMetrics};
use berth_ports::{
    AttachedVolumes, ClaimedVolumes, NodeFacts, StorageError, StorageObjects, SystemClock, VolumeManager,
};
use berth_types::{Pod, api};
use berth_volumes::{CredentialStorage, NfsPlugin, PodVolumeManager, ThisMachine, VolumesConfig, VolumesDeps};
use futures::FutureExt;
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use serde_json::{Value, json};
use tokio::{sync::watch, time::timeout};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

use berth_testkit::port_fakes::{NoApi, Recorder};

/// Timeout of steps that take moments; the machine is emulated.
const PATIENCE: Duration = Duration::from_secs(75);
/// Exported directory of the server.
const EXPORTED: &str = "/srv";
const ROOT: &str = "/var/lib/kubelet";

type Check = fn() -> Pin<Box<dyn Future<Output = ()>>>;

macro_rules! checks {
    ($($name:ident)*) => {
        const CHECKS: &[(&str, Check)] = &[$((stringify!($name), || Box::pin($name()))),*];
    };
}

checks! {
    a_share_is_what_its_pod_writes_to
    a_read_only_share_is_not_written_to
    a_stale_share_goes_with_its_pod
    a_stale_share_of_an_agent_before_goes_too
    a_server_that_is_away_holds_up_its_own_pods_only
}

/// Names of all checks, in order.
pub fn names() -> impl Iterator<Item = &'static str> {
    CHECKS.iter().map(|(name, _)| *name)
}

#[test]
#[ignore = "runs inside"]
fn inside() {
    if !Path::new("/proc/fs/nfsd/threads").exists() {
        println!("skipped: runs on the machine that shares_of_a_real_server boots");
        return;
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    runtime.block_on(async {
        for (name, check) in CHECKS {
            let begun = Instant::now();
            let is_good = AssertUnwindSafe(check()).catch_unwind().await.is_ok();
            let verdict = if is_good { "ok" } else { "FAILED" };
            println!("{:.1?}: test {name} ... {verdict}", begun.elapsed());
        }
    });
    // A thread that hangs in a share cannot be joined.
    runtime.shutdown_background();
}

/// API objects without any claim.
struct NoClaims;

#[async_trait]
impl StorageObjects for NoClaims {
    async fn claim(&self, _: &str, _: &str) -> Result<Arc<api::PersistentVolumeClaim>, StorageError> {
        Err(StorageError::NoClient)
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
        watch::channel(Some(Arc::default())).1
    }

    fn retry_signal(&self) -> watch::Receiver<u64> {
        watch::channel(0).1
    }
}

/// Volume manager of a node.
struct VolumesFixture {
    volumes: Arc<PodVolumeManager>,
    events: Arc<Recorder>,
    _stop: DropGuard,
}

impl VolumesFixture {
    fn new() -> Self {
        let (stop, events) = (CancellationToken::new(), Arc::new(Recorder::default()));
        fs::create_dir_all(ROOT).expect("a directory");
        let deps = VolumesDeps {
            facts: watch::channel(Arc::new(NodeFacts::default())).1,
            objects: Arc::new(NoApi),
            events: events.clone(),
            clock: Arc::new(SystemClock),
            metrics: VolumeMetrics::new(&Registry::new()),
            storage: Arc::new(NoClaims),
            plugins: vec![Arc::new(NfsPlugin::new(Arc::new(ThisMachine::default())))],
            labels: None,
            reported: watch::channel(Arc::default()).1,
            in_use: watch::Sender::default(),
            tasks: TaskTracker::new(),
            stop: stop.clone(),
        };
        let config = VolumesConfig { root: ROOT.into(), credentials: CredentialStorage::OnDisk };
        Self { volumes: Arc::new(PodVolumeManager::new(config, deps)), events, _stop: stop.drop_guard() }
    }

    /// Mounts a pod's volumes; returns the path of its volume, and the mode of created sub-paths.
    async fn mount(&self, pod: &Arc<Pod>) -> (PathBuf, u32) {
        let mounted = timeout(PATIENCE, self.volumes.mount(pod)).await.expect("in time");
        let mounted = mounted.unwrap_or_else(|error| panic!("{error}; {:?}", self.events.texts()));
        let volume = mounted.by_name.get("v").expect("its volume");
        (volume.host_path.clone().expect("a path"), volume.sub_path_mode)
    }

    /// Unmounts until the pod has no volume. An attempt may time out before the share is unmounted.
    async fn unmount(&self, pod: &Pod) {
        let begun = Instant::now();
        while let Err(error) = self.volumes.unmount(pod.uid()).await {
            assert!(begun.elapsed() < PATIENCE * 3, "{error}");
        }
        self.volumes.remove_directory(pod.uid()).await.expect("nothing of it is left");
    }
}

fn pod(name: &str, volume: Value) -> Arc<Pod> {
    let mut volumes = json!([{"name": "v"}]);
    for (kind, source) in volume.as_object().expect("a source") {
        volumes[0][kind] = source.clone();
    }
    let pod = json!({"metadata": {"name": name, "namespace": "n", "uid": format!("uid-{name}")}, "spec": {
        "volumes": volumes, "containers": [{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]}});
    Arc::new(Pod::new(serde_json::from_value(pod).expect("a pod")).expect("complete"))
}

fn of_share(name: &str, path: &str) -> Arc<Pod> {
    pod(name, json!({"nfs": {"server": "127.0.0.1", "path": path}}))
}

/// Creates a directory on the server.
fn exported(name: &str) -> PathBuf {
    let path = Path::new(EXPORTED).join(name);
    fs::create_dir_all(&path).expect("a directory");
    path
}

fn is_mounted(path: &Path) -> bool {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("a table");
    table.lines().any(|line| line.split(' ').nth(4) == path.to_str())
}

/// Sets the number of server threads.
fn serve(threads: &str) {
    if threads == "0" {
        return fs::write("/proc/fs/nfsd/threads", "0\n").expect("received");
    }
    let started = Command::new("rpc.nfsd").args(["--no-nfs-version", "3", threads]).status();
    assert!(started.expect("a program").success());
}

async fn a_share_is_what_its_pod_writes_to() {
    let (node, there) = (VolumesFixture::new(), exported("one"));
    fs::set_permissions(&there, fs::Permissions::from_mode(0o2770)).expect("set");
    let pod = of_share("a", "/one");
    let (path, mode) = node.mount(&pod).await;
    assert!(is_mounted(&path) && mode == 0o2770, "{mode:o}");
    let usage = node.volumes.usage(&path).await.expect("received");
    assert!(usage.capacity > 0 && usage.used <= usage.capacity, "{usage:?}");
    fs::write(path.join("file"), "hello").expect("written");
    assert_eq!(fs::read_to_string(there.join("file")).expect("there"), "hello");
    assert_eq!(node.mount(&pod).await.0, path, "once is enough");
    node.unmount(&pod).await;
    assert!(!is_mounted(&path) && !path.exists());
    assert_eq!(fs::read_to_string(there.join("file")).expect("it stays"), "hello");
}

async fn a_read_only_share_is_not_written_to() {
    let node = VolumesFixture::new();
    exported("two");
    let pod = pod("b", json!({"nfs": {"server": "127.0.0.1", "path": "/two", "readOnly": true}}));
    let (path, _) = node.mount(&pod).await;
    let refused = fs::write(path.join("file"), "").expect_err("read-only");
    assert_eq!(refused.kind(), io::ErrorKind::ReadOnlyFilesystem);
    node.unmount(&pod).await;
}

/// Removes a mounted directory on the server, and waits until the client gets ESTALE.
async fn make_stale(there: &Path, mounted: &Path) {
    fs::remove_dir_all(there).expect("removed");
    let begun = Instant::now();
    loop {
        let result = fs::metadata(mounted).map(drop).map_err(|error| error.raw_os_error());
        if result == Err(Some(nix::libc::ESTALE)) {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "{result:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn a_stale_share_goes_with_its_pod() {
    let (node, there, pod) = (VolumesFixture::new(), exported("three"), of_share("c", "/three"));
    let (path, _) = node.mount(&pod).await;
    make_stale(&there, &path).await;
    assert!(is_mounted(&path));
    node.unmount(&pod).await;
    assert!(!is_mounted(&path) && !path.exists());
    let (volumes, waits) = (node.volumes.clone(), pod.clone());
    let waiting = tokio::spawn(async move { volumes.mount(&waits).await.map(drop) });
    let begun = Instant::now();
    while !node.events.texts().iter().any(|event| event.contains("mount failed: exit status 32")) {
        assert!(begun.elapsed() < PATIENCE, "nothing is told of a share that is not there: {:?}", node.events.texts());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    waiting.abort();
    node.unmount(&pod).await;
    exported("three");
    node.mount(&pod).await;
    node.unmount(&pod).await;
}

async fn a_stale_share_of_an_agent_before_goes_too() {
    let (there, pod) = (exported("four"), of_share("d", "/four"));
    let path = VolumesFixture::new().mount(&pod).await.0;
    make_stale(&there, &path).await;
    VolumesFixture::new().unmount(&pod).await;
    assert!(!is_mounted(&path) && !path.exists());
}

async fn a_server_that_is_away_holds_up_its_own_pods_only() {
    let node = VolumesFixture::new();
    exported("five");
    let (mounted, late) = (of_share("e", "/five"), of_share("f", "/five"));
    let (path, _) = node.mount(&mounted).await;
    fs::write(path.join("file"), "kept").expect("written");
    serve("0");
    let (sender, receiver) = mpsc::channel();
    let place = path.join("other");
    std::thread::spawn(move || sender.send(fs::metadata(place).map(drop)));
    // Another pod waits for its share meanwhile.
    let (volumes, waits) = (node.volumes.clone(), late.clone());
    let waiting = tokio::spawn(async move { volumes.mount(&waits).await.map(drop) });
    let begun = Instant::now();
    while !Path::new(ROOT).join("pods/uid-f/volumes/kubernetes.io~nfs/v").exists() {
        assert!(begun.elapsed() < PATIENCE, "it does not begin");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let other = pod("g", json!({"emptyDir": {}}));
    node.mount(&other).await;
    node.mount(&mounted).await;
    node.unmount(&other).await;
    let error = node.volumes.usage(&path).await.expect_err("unknown");
    assert!(error.ends_with("timed out after 8s") || error.ends_with("context deadline exceeded"), "{error}");
    assert!(matches!(receiver.try_recv(), Err(mpsc::TryRecvError::Empty)), "it hangs");
    assert!(!waiting.is_finished());
    // Both pods are removed.
    waiting.abort();
    node.unmount(&late).await;
    node.unmount(&mounted).await;
    assert!(!is_mounted(&path) && !path.exists());
    serve("2");
    let (path, _) = node.mount(&mounted).await;
    assert_eq!(fs::read_to_string(path.join("file")).expect("there"), "kept");
    node.unmount(&mounted).await;
}
