//! Claims through the whole manager, with a scripted fake plugin.

use std::{
    collections::BTreeSet,
    sync::{Mutex, atomic::Ordering},
};

use async_trait::async_trait;
use serde_json::{Value, json};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::*;
use crate::{
    CredentialStorage, OpError, PodVolumeManager, VolumesConfig, VolumesDeps,
    testing::{Answer, FakePlugin, FakeStorage},
};
use berth_metrics::{Registry, VolumeMetrics};
use berth_ports::{
    ClaimedVolumes, EventRecord, EventSink, NodeFacts, ObjectError, ObjectSource, PullSecret, SystemClock, VolumeError,
    VolumeManager,
};

#[cfg(test)]
mod selinux;

/// API server without objects; records events.
#[derive(Default)]
struct World(Mutex<Vec<String>>);

impl EventSink for World {
    fn record(&self, event: EventRecord) {
        self.0.lock().expect("not poisoned").push(format!("{} {}", event.reason, event.message));
    }
}

#[async_trait]
impl ObjectSource for World {
    async fn config_map(&self, _: &str, name: &str) -> Result<Arc<BTreeMap<String, String>>, ObjectError> {
        Err(ObjectError::NotFound { kind: "configmap", name: name.to_owned() })
    }
    async fn secret(&self, _: &str, name: &str) -> Result<Arc<BTreeMap<String, Vec<u8>>>, ObjectError> {
        Err(ObjectError::NotFound { kind: "secret", name: name.to_owned() })
    }
    fn services(&self, _: &str) -> Option<Vec<Arc<api::Service>>> {
        None
    }
    async fn runtime_handler(&self, _: Option<&str>) -> Result<String, ObjectError> {
        Ok(String::new())
    }
    async fn pull_secrets(&self, _: &Pod) -> (Vec<PullSecret>, Vec<String>) {
        Default::default()
    }
}

struct Bench {
    dir: tempfile::TempDir,
    manager: PodVolumeManager,
    plugin: Arc<FakePlugin>,
    storage: Arc<FakeStorage>,
    world: Arc<World>,
}

fn bench(traits: VolumeTraits) -> Bench {
    bench_in(tempfile::tempdir().expect("a directory"), traits)
}

fn bench_in(dir: tempfile::TempDir, traits: VolumeTraits) -> Bench {
    bench_with(dir, traits, None)
}

fn bench_with(dir: tempfile::TempDir, traits: VolumeTraits, labels: Option<LabelPolicy>) -> Bench {
    let (plugin, storage, world) =
        (FakePlugin::new(traits), Arc::new(FakeStorage::default()), Arc::new(World::default()));
    let deps = VolumesDeps {
        facts: watch::channel(Arc::new(NodeFacts::default())).1,
        objects: world.clone(),
        events: world.clone(),
        clock: Arc::new(SystemClock),
        metrics: VolumeMetrics::new(&Registry::new()),
        storage: storage.clone(),
        plugins: vec![plugin.clone()],
        labels,
        reported: watch::channel(Arc::new(BTreeSet::new())).1,
        in_use: watch::Sender::default(),
        tasks: TaskTracker::new(),
        stop: CancellationToken::new(),
    };
    let config = VolumesConfig { root: dir.path().to_owned(), credentials: CredentialStorage::OnDisk };
    Bench { manager: PodVolumeManager::new(config, deps), dir, plugin, storage, world }
}

fn staged() -> VolumeTraits {
    VolumeTraits { stages: true, ..VolumeTraits::default() }
}

/// A pod that mounts these volumes.
fn pod(volumes: Value) -> Arc<Pod> {
    let names: Vec<&str> = volumes.as_array().expect("a list").iter().filter_map(|v| v["name"].as_str()).collect();
    let mounts: Vec<Value> = names.iter().map(|name| json!({"name": name, "mountPath": format!("/{name}")})).collect();
    let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"},
        "spec": {"containers": [{"name": "c", "volumeMounts": mounts}], "volumes": volumes}});
    Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"))
}

fn claim(name: &str) -> Value {
    json!({"name": name, "persistentVolumeClaim": {"claimName": format!("c{name}")}})
}

#[tokio::test(start_paused = true)]
async fn an_unusable_claim_is_reported_at_once_and_read_with_back_off() {
    // AC-07-14, AC-10-40
    let bench = bench(staged());
    bench.storage.put("ok", &json!({}));
    let pod = pod(json!([claim("no"), {"name": "e", "emptyDir": {}}, claim("ok")]));
    // Whether the other volume is mounted by then depends on its owner task's timing.
    let text = |missing: &str| {
        format!(
            "unmounted volumes=[{missing}], unattached volumes=[], failed to process volumes=[no]: error processing PVC n/cno: \
                failed to fetch PVC from API server: persistentvolumeclaims \"cno\" not found"
        )
    };
    let error = bench.manager.mount(&pod).await.expect_err("no claim");
    assert!(["no ok", "no"].map(|missing| VolumeError::Failed(text(missing))).contains(&error), "{error}");
    let before = *bench.storage.reads.lock().expect("not poisoned");
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(60) {
        bench.manager.mount(&pod).await.expect_err("still none");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let reads = *bench.storage.reads.lock().expect("not poisoned") - before;
    assert!(reads <= 12, "{reads} reads, two of them of the other claim");
    bench.storage.put("no", &json!({}));
    tokio::time::sleep(Duration::from_secs(8)).await;
    let mounted = bench.manager.mount(&pod).await.expect("all");
    assert_eq!(mounted.by_name.keys().map(String::as_str).collect::<Vec<_>>(), ["e", "no", "ok"]);
}

#[tokio::test(start_paused = true)]
async fn a_missing_attachment_times_out_without_an_event() {
    // AC-07-15
    let bench = bench(VolumeTraits { attachable: true, stages: true, ..VolumeTraits::default() });
    bench.storage.put("v", &json!({}));
    let began = Instant::now();
    let error = bench.manager.mount(&pod(json!([claim("v")]))).await.expect_err("the volume is not attached");
    assert_eq!(began.elapsed(), Duration::from_secs(123));
    let text = "unmounted volumes=[v], unattached volumes=[v], failed to process volumes=[]: context deadline exceeded";
    assert_eq!(error, VolumeError::TimedOut(text.to_owned()));
    assert!(bench.world.0.lock().expect("not poisoned").is_empty());
    bench.manager.unmount(&"u".into()).await.expect("nothing of it is there");
    assert!(bench.plugin.calls().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_mount_timeout_is_reported_with_its_cause() {
    let bench = bench(staged());
    bench.storage.put("v", &json!({}));
    for _ in 0..20 {
        bench.plugin.next("stage", Answer::Fails(OpError::transient("mount.nfs: Connection refused")));
    }
    let error = bench.manager.mount(&pod(json!([claim("v")]))).await.expect_err("it cannot be staged").to_string();
    assert!(
        error.starts_with("unmounted volumes=[v]") && error.ends_with(" : mount.nfs: Connection refused"),
        "{error}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_pod_whose_volume_the_node_cannot_take_is_rejected() {
    let bench = bench(VolumeTraits { attachable: true, stages: true, ..VolumeTraits::default() });
    bench.storage.put("v", &json!({}));
    bench.plugin.is_over.store(true, Ordering::Relaxed);
    let error = bench.manager.mount(&pod(json!([claim("v")]))).await.expect_err("the volume is not attached");
    let text = "Node has reached its volume attachment limit, rejecting pod. unmounted volumes=[v], unattached \
                volumes=[v], failed to process volumes=[]: context deadline exceeded";
    assert_eq!(error, VolumeError::LimitExceeded(text.to_owned()));
}

#[tokio::test(start_paused = true)]
async fn usage_of_claimed_volumes_is_reported() {
    let bench = bench(staged());
    bench.storage.put("v", &json!({}));
    assert!(bench.manager.of(&"u".into()).is_empty());
    bench.manager.mount(&pod(json!([claim("v"), {"name": "e", "emptyDir": {}}]))).await.expect("mounted");
    let claimed = bench.manager.of(&"u".into());
    let [own] = claimed.as_slice() else { panic!("one: {claimed:?}") };
    assert_eq!((own.volume.as_str(), &own.claim), ("v", &("n".to_owned(), "cv".to_owned())));
    assert_eq!(bench.manager.usage(&own.path).await.map(|full| full.capacity), Ok(100));
    bench.plugin.next("fullness", Answer::Hangs);
    assert_eq!(bench.manager.usage(&own.path).await.expect_err("it hangs"), "context deadline exceeded");
    bench.plugin.next("fullness", Answer::Panics);
    assert_eq!(bench.manager.usage(&own.path).await.expect_err("it panics"), "panic: on purpose");
    bench.manager.unmount(&"u".into()).await.expect("unmounted");
    assert!(bench.manager.of(&"u".into()).is_empty() && bench.manager.usage(&own.path).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn what_is_mounted_serves_on_whoever_answers() {
    // AC-07-32
    let bench = bench(staged());
    bench.storage.put("v", &json!({}));
    let pod = pod(json!([claim("v")]));
    let first = bench.manager.mount(&pod).await.expect("mounted");
    let reads = *bench.storage.reads.lock().expect("not poisoned");
    bench.manager.mount(&pod).await.expect("still");
    assert_eq!(*bench.storage.reads.lock().expect("not poisoned"), reads, "no object is read");
    bench.storage.is_away.store(true, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(100)).await;
    assert_eq!(bench.manager.mount(&pod).await.expect("still"), first);
    assert_eq!(bench.plugin.calls(), ["stage p", "publish p"]);
    bench.manager.unmount(&"u".into()).await.expect("no response is needed");
    assert!(bench.plugin.there.lock().expect("not poisoned").is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_starts_again_goes_on_with_what_is_there() {
    // AC-07-20, AC-07-21
    let dir = tempfile::tempdir().expect("a directory");
    for volume in ["u/volumes/kubernetes.io~fake/v", "gone/volumes/kubernetes.io~fake/w"] {
        std::fs::create_dir_all(dir.path().join("pods").join(volume)).expect("a directory");
    }
    let bench = bench_in(dir, staged());
    bench.storage.put("v", &json!({}));
    bench.manager.rebuild().await.expect("known");
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(bench.plugin.calls().is_empty(), "the desired state is not known yet");
    bench.manager.mount(&pod(json!([claim("v")]))).await.expect("set up again");
    assert_eq!(bench.plugin.calls(), ["stage p", "publish p"]);
    bench.manager.remove_directory(&"gone".into()).await.expect("removed");
    assert_eq!(bench.plugin.calls()[2..], ["unpublish gone", "unstage"]);
    assert!(!bench.dir.path().join("pods/gone").exists());
}

#[tokio::test(start_paused = true)]
async fn a_grown_volume_is_expanded_and_its_claim_patched() {
    let bench = bench(VolumeTraits { stages: true, expands: true, ..VolumeTraits::default() });
    bench.storage.put("v", &json!({"capacity": {"storage": "2Gi"}}));
    bench.manager.mount(&pod(json!([claim("v")]))).await.expect("mounted");
    tokio::time::sleep(Duration::from_millis(10)).await;
    bench.manager.mount(&pod(json!([claim("v")]))).await.expect("mounted");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(bench.plugin.calls(), ["stage p", "publish p", "expand p"], "once");
    let patches = bench.storage.patches.lock().expect("not poisoned").clone();
    assert_eq!(patches, [r#"{"metadata":{},"status":{"capacity":{"storage":"2Gi"}}}"#]);
    let events = bench.world.0.lock().expect("not poisoned").clone();
    let line = "FileSystemResizeSuccessful MountVolume.NodeExpandVolume succeeded for volume \"v\" ";
    assert_eq!(events, [line, line], "of the pod, and of the claim");
}

#[tokio::test(start_paused = true)]
async fn an_expansion_waits_for_a_claim_that_follows_its_volume_late() {
    let bench = bench(VolumeTraits { stages: true, expands: true, ..VolumeTraits::default() });
    bench.storage.put("v", &json!({"capacity": {"storage": "2Gi"}}));
    let set_resize_status = |state: &str| {
        let mut claims = bench.storage.claims.lock().expect("not poisoned");
        let mut claim = (*claims["cv"]).clone();
        let status = json!({"phase": "Bound", "capacity": {"storage": "1Gi"}, "allocatedResources": {"storage": "2Gi"},
            "allocatedResourceStatuses": {"storage": state}});
        claim.status = Some(serde_json::from_value(status).expect("a status"));
        claims.insert("cv".to_owned(), Arc::new(claim));
    };
    set_resize_status("ControllerResizeInProgress");
    let turns = async |seconds: u64| {
        for _ in 0..seconds {
            bench.manager.mount(&pod(json!([claim("v")]))).await.expect("mounted");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    turns(70).await;
    assert_eq!(bench.plugin.calls(), ["stage p", "publish p"], "not the node's to do yet");
    set_resize_status("NodeResizePending");
    turns(70).await;
    assert_eq!(bench.plugin.calls(), ["stage p", "publish p", "expand p"]);
}

#[tokio::test]
async fn nothing_is_done_before_it_is_known_what_was_left() {
    let dir = tempfile::tempdir().expect("a directory");
    let pods = dir.path().join("pods");
    // A symlink to itself is unreadable even for root.
    std::os::unix::fs::symlink("pods", &pods).expect("a link");
    let bench = bench_in(dir, staged());
    bench.storage.put("v", &json!({}));
    let pod = pod(json!([claim("v")]));
    let error = bench.manager.mount(&pod).await.expect_err("unknown").to_string();
    assert!(error.starts_with("reconstructing volumes: "), "{error}");
    for failed in [bench.manager.unmount(&"u".into()).await, bench.manager.remove_directory(&"u".into()).await] {
        assert!(failed.is_err(), "nothing is taken for gone");
    }
    assert!(bench.plugin.calls().is_empty());
    std::fs::remove_file(&pods).expect("removed");
    bench.manager.mount(&pod).await.expect("read again");
    bench.manager.unmount(&"u".into()).await.expect("unmounted");
}
