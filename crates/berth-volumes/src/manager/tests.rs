//! The volume manager on real directories.

use std::{
    collections::BTreeMap,
    fs::Permissions,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    sync::Mutex,
};

use serde_json::{Value, json};

#[cfg(test)]
mod media;

use super::*;
use crate::{orphan_backoff::PAUSE, testing::FakeStorage};
use berth_metrics::Registry;
use berth_ports::{EventRecord, ObjectError, SystemClock, TokenRequest};
use berth_types::api;

struct Bench {
    dir: tempfile::TempDir,
    manager: PodVolumeManager,
    world: Arc<World>,
}

/// Objects of the fake API server, and recorded events.
#[derive(Default)]
struct World {
    config_maps: Mutex<BTreeMap<String, BTreeMap<String, String>>>,
    secrets: Mutex<BTreeMap<String, BTreeMap<String, Vec<u8>>>>,
    token: Mutex<Option<String>>,
    asked: Mutex<Vec<TokenRequest>>,
    adopted: Mutex<Vec<(TokenRequest, String)>>,
    events: Mutex<Vec<String>>,
    /// While set, token requests wait for a permit.
    issuing: Option<tokio::sync::Semaphore>,
    /// No API server is configured.
    standalone: std::sync::atomic::AtomicBool,
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().expect("not poisoned")
}

impl World {
    fn found<T: Clone>(
        &self,
        kind: &'static str,
        name: &str,
        all: &BTreeMap<String, T>,
    ) -> Result<Arc<T>, ObjectError> {
        if self.standalone.load(std::sync::atomic::Ordering::Relaxed) {
            return Err(ObjectError::NoClient { kind, namespace: "n".into(), name: name.into() });
        }
        all.get(name).cloned().map(Arc::new).ok_or_else(|| ObjectError::NotFound { kind, name: name.into() })
    }

    fn put(&self, name: &str, data: &[(&str, &str)]) {
        let data = data.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        locked(&self.config_maps).insert(name.to_owned(), data);
    }
}

#[async_trait]
impl ObjectSource for World {
    async fn config_map(&self, _: &str, name: &str) -> Result<Arc<BTreeMap<String, String>>, ObjectError> {
        self.found("configmap", name, &locked(&self.config_maps))
    }

    async fn secret(&self, _: &str, name: &str) -> Result<Arc<BTreeMap<String, Vec<u8>>>, ObjectError> {
        self.found("secret", name, &locked(&self.secrets))
    }

    fn services(&self, _: &str) -> Option<Vec<Arc<api::Service>>> {
        None
    }

    async fn runtime_handler(&self, _: Option<&str>) -> Result<String, ObjectError> {
        Ok(String::new())
    }

    async fn pull_secrets(&self, _: &Pod) -> (Vec<berth_ports::PullSecret>, Vec<String>) {
        (Vec::new(), Vec::new())
    }

    fn adopt_token(&self, _: &Pod, ask: &TokenRequest, token: &str) {
        locked(&self.adopted).push((ask.clone(), token.to_owned()));
    }

    async fn token(&self, _: &Pod, ask: &TokenRequest) -> Result<String, ObjectError> {
        locked(&self.asked).push(ask.clone());
        if let Some(issuing) = &self.issuing {
            issuing.acquire().await.expect("open").forget();
        }
        locked(&self.token).clone().ok_or_else(|| ObjectError::Other("failed to fetch token: no".into()))
    }
}

impl EventSink for World {
    fn record(&self, event: EventRecord) {
        locked(&self.events).push(format!("{} {}", event.reason, event.message));
    }
}

fn bench() -> Bench {
    bench_with(CredentialStorage::OnDisk)
}

fn bench_with(credentials: CredentialStorage) -> Bench {
    bench_in(tempfile::tempdir().expect("a directory"), credentials)
}

fn bench_in(dir: tempfile::TempDir, credentials: CredentialStorage) -> Bench {
    bench_of(dir, credentials, World::default())
}

fn bench_of(dir: tempfile::TempDir, credentials: CredentialStorage, world: World) -> Bench {
    let facts = NodeFacts { allocatable: [("cpu".to_owned(), "4".to_owned())].into(), ..NodeFacts::default() };
    let (_, facts) = watch::channel(Arc::new(facts));
    let config = VolumesConfig { root: dir.path().to_owned(), credentials };
    let metrics = VolumeMetrics::new(&Registry::new());
    let world = Arc::new(world);
    let (objects, events) = (world.clone(), world.clone());
    let deps = VolumesDeps {
        facts,
        objects,
        events,
        clock: Arc::new(SystemClock),
        metrics,
        storage: Arc::new(FakeStorage::default()),
        plugins: Vec::new(),
        labels: None,
        reported: watch::channel(Arc::default()).1,
        in_use: watch::Sender::default(),
        tasks: TaskTracker::new(),
        stop: CancellationToken::new(),
    };
    Bench { manager: PodVolumeManager::new(config, deps), dir, world }
}

impl Bench {
    fn at(&self, path: &str) -> PathBuf {
        self.dir.path().join("pods/u").join(path)
    }

    async fn mount(&self, volumes: Value) -> Result<Arc<MountedVolumes>, String> {
        self.manager.mount(&pod(volumes)).await.map_err(|e| e.to_string())
    }
}

/// A pod that mounts each of these volumes at `/<name>`.
fn pod(volumes: Value) -> Arc<Pod> {
    let mounts: Vec<Value> = volumes
        .as_array()
        .expect("a list")
        .iter()
        .map(|v| json!({"name": v["name"], "mountPath": format!("/{}", v["name"].as_str().expect("a name"))}))
        .collect();
    let object = json!({
        "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"a": "1"}},
        "spec": {"volumes": volumes, "containers": [{"name": "c", "volumeMounts": mounts}]},
    });
    Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"))
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("metadata").mode() & 0o7777
}

fn downward(label: &str) -> Value {
    let items = json!([
        {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}},
        {"path": "sub/name", "mode": 256, "fieldRef": {"fieldPath": label}},
        {"path": "cpu", "resourceFieldRef": {"containerName": "c", "resource": "limits.cpu", "divisor": "1m"}}]);
    json!([{"name": "d", "downwardAPI": {"defaultMode": 420, "items": items}}])
}

#[tokio::test]
async fn an_empty_dir_is_made_marked_and_taken_down() {
    // AC-07-1
    let bench = bench();
    let mounted = bench.mount(json!([{"name": "v", "emptyDir": {}}])).await.expect("mounted");
    let volume = bench.at("volumes/kubernetes.io~empty-dir/v");
    let one = &mounted.by_name["v"];
    assert_eq!(one.host_path.as_deref().map(|p| p.ends_with("pods/u/volumes/kubernetes.io~empty-dir/v")), Some(true));
    assert_eq!((one.read_only, one.relabel, one.sub_path_mode), (false, true, 0o777));
    assert_eq!(mode(&volume), 0o777);
    let ready = bench.at("plugins/kubernetes.io~empty-dir/v/ready");
    assert!(ready.exists());
    for dir in ["", "volumes", "plugins"] {
        assert_eq!(mode(&bench.at(dir)), 0o750, "{dir}");
    }
    fs::write(volume.join("data"), "x").expect("a file");
    bench.mount(json!([{"name": "v", "emptyDir": {}}])).await.expect("again");
    assert!(volume.join("data").exists(), "a complete volume is left alone");
    fs::remove_dir_all(&volume).expect("removed");
    bench.mount(json!([{"name": "v", "emptyDir": {}}])).await.expect("made again");
    assert!(volume.is_dir() && ready.exists());

    symlink("/etc", volume.join("link")).expect("a link");
    bench.manager.unmount(&"u".into()).await.expect("unmounted");
    assert!(!volume.exists() && !ready.exists() && Path::new("/etc").is_dir());
    assert_eq!(bench.manager.pods_on_disk().await, [PodUid::from("u")]);
    bench.manager.remove_directory(&"u".into()).await.expect("removed");
    assert_eq!(bench.manager.pods_on_disk().await, []);
}

#[tokio::test]
async fn downward_files_follow_the_pod() {
    let bench = bench();
    let mounted = bench.mount(downward("metadata.name")).await.expect("mounted");
    assert!(mounted.by_name["d"].read_only && mounted.by_name["d"].relabel);
    let volume = bench.at("volumes/kubernetes.io~downward-api/d");
    let read = |name: &str| fs::read_to_string(volume.join(name)).expect(name);
    assert_eq!((read("labels"), read("sub/name"), read("cpu")), ("a=\"1\"".into(), "p".into(), "4000".into()));
    assert_eq!((mode(&volume.join("labels")), mode(&volume.join("sub/name"))), (0o644, 0o400));
    assert!(bench.at("plugins/kubernetes.io~empty-dir/wrapped_d/ready").exists());
    let version = fs::read_link(volume.join("..data")).expect("a link");
    bench.mount(downward("metadata.name")).await.expect("again");
    assert_eq!(fs::read_link(volume.join("..data")).expect("a link"), version, "nothing changed");
    bench.mount(downward("metadata.uid")).await.expect("refreshed");
    assert_eq!(read("sub/name"), "u");
    let other = bench.mount(downward("spec.nodeName")).await;
    assert_eq!(
        (other.is_ok(), &locked(&bench.world.events)[..]),
        (
            true,
            &["FailedMount MountVolume.SetUp failed for volume \"d\" : unsupported fieldPath: spec.nodeName"
                .to_owned()][..]
        )
    );
    assert_eq!(read("sub/name"), "u", "what was there stays");
    bench.manager.unmount(&"u".into()).await.expect("unmounted");
    assert!(!volume.exists());
}

#[tokio::test]
async fn other_kinds_are_refused_by_name() {
    let bench = bench();
    for (sources, text) in [
        (
            json!([{"clusterTrustBundle": {"name": "x", "path": "p"}}]),
            "ClusterTrustBundle projection is not supported in static kubelet mode",
        ),
        (
            json!([{"clusterTrustBundle": {"path": "p"}}, {"podCertificate": {"signerName": "s", "keyType": "ED25519"}}]),
            "[ClusterTrustBundle projection requires either name or signerName to be set, unimplemented]",
        ),
    ] {
        let volume = json!({"name": "v", "projected": {"defaultMode": 420, "sources": sources}});
        let refused = bench.mount(json!([volume])).await.expect_err("behind a gate");
        assert!(refused.ends_with(&format!("MountVolume.SetUp failed for volume \"v\" : {text}")), "{refused}");
    }
    let clones = json!([{"name": "v", "gitRepo": {"repository": "r"}}]);
    let refused = bench.mount(clones).await.expect_err("off for good");
    let text = "git-repo volume plugin has been disabled; if necessary, it may be re-enabled by enabling the \
                feature-gate `GitRepoVolumeDriver`";
    assert!(refused.ends_with(&format!("MountVolume.SetUp failed for volume \"v\" : {text}")), "{refused}");
    let refused = bench.mount(json!([{"name": "v", "emptyDir": {"medium": "Tape"}}])).await.expect_err("no medium");
    assert!(
        refused.ends_with("MountVolume.SetUp failed for volume \"v\" : unknown storage medium \"Tape\""),
        "{refused}"
    );
}

#[tokio::test]
async fn host_paths_are_checked_and_left_alone() {
    // AC-07-4
    let bench = bench();
    let here = bench.dir.path().join("here");
    fs::create_dir(&here).expect("a directory");
    fs::set_permissions(&here, Permissions::from_mode(0o701)).expect("a mode");
    let volume = |kind: &str| json!([{"name": "h", "hostPath": {"path": here, "type": kind}}]);
    let mounted = bench.mount(volume("Directory")).await.expect("mounted");
    let one = &mounted.by_name["h"];
    assert_eq!((one.host_path.as_ref(), one.relabel, one.sub_path_mode), (Some(&here), false, 0o701));
    let refused = bench.mount(volume("File")).await.expect_err("a directory");
    assert!(refused.ends_with(&format!("hostPath type check failed: {} is not a file", here.display())), "{refused}");
    let up = json!([{"name": "h", "hostPath": {"path": "/a/../b"}}]);
    let refused = bench.mount(up).await.expect_err("upwards");
    assert!(refused.ends_with("invalid HostPath `/a/../b`: must not contain '..'"), "{refused}");
    bench.manager.unmount(&"u".into()).await.expect("unmounted");
    assert!(here.is_dir());
}

#[tokio::test(start_paused = true)]
async fn data_of_others_is_never_deleted() {
    // AC-07-29
    let bench = bench();
    fs::create_dir_all(bench.at("volumes/kubernetes.io~nfs/v")).expect("directories");
    fs::write(bench.at("volumes/kubernetes.io~nfs/v/file"), "x").expect("a file");
    fs::create_dir_all(bench.at("volumes/kubernetes.io~empty-dir/w")).expect("directories");
    fs::write(bench.at("volumes/kubernetes.io~empty-dir/w/no-marker"), "x").expect("a file");
    let uid = PodUid::from("u");
    let refused = bench.manager.remove_directory(&uid).await.expect_err("not empty").to_string();
    assert!(refused.starts_with("orphaned pod \"u\" found, but failed to rmdir() volume at path "), "{refused}");
    fs::remove_file(bench.at("volumes/kubernetes.io~empty-dir/w/no-marker")).expect("removed");
    assert_eq!(
        bench.manager.remove_directory(&uid).await.map_err(|e| e.to_string()),
        Err(refused.clone()),
        "no rescan before the pause ends"
    );
    tokio::time::advance(PAUSE.0).await;
    let refused = bench.manager.remove_directory(&uid).await.expect_err("still not empty").to_string();
    assert!(refused.contains("kubernetes.io~nfs/v"), "{refused}");
    assert!(bench.at("volumes/kubernetes.io~nfs/v/file").exists());
    assert!(bench.manager.unmount(&uid).await.is_err(), "nor by taking down");
    fs::remove_file(bench.at("volumes/kubernetes.io~nfs/v/file")).expect("removed");
    tokio::time::advance(PAUSE.1).await;
    bench.manager.remove_directory(&uid).await.expect("empty now");
    assert_eq!(bench.manager.pods_on_disk().await, []);
}

#[tokio::test(start_paused = true)]
async fn what_is_no_pods_stays_where_pods_lie() {
    // Spec 07 §5.4: user data is never deleted, such as a backup or files put beside the parts of a pod.
    let bench = bench();
    let foreign = ["backup/data/file", "u.old/file", "u/notes"];
    let ours = ["u/containers/c/12345678", "u/etc-hosts", "u/userns", "u/.0123abcd"];
    for path in foreign.iter().chain(&ours) {
        let path = bench.dir.path().join("pods").join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("directories");
        fs::write(path, "x").expect("a file");
    }
    for (uid, what) in [("backup", "data"), ("u.old", "file"), ("u", "notes")] {
        let refused = bench.manager.remove_directory(&uid.into()).await.expect_err("not a pod's").to_string();
        let begins =
            format!("orphaned pod {uid:?} found, but error occurred when trying to remove the pod directory: ");
        assert!(refused.starts_with(&begins), "{refused}");
        assert!(refused.ends_with(&format!("/pods/{uid}/{what} is not part of a pod")), "{refused}");
    }
    for path in foreign.iter().chain(&ours) {
        assert!(bench.dir.path().join("pods").join(path).exists(), "{path}");
    }
    fs::remove_file(bench.at("notes")).expect("removed");
    tokio::time::advance(PAUSE.0).await;
    bench.manager.remove_directory(&"u".into()).await.expect("a pod's and nobody else's");
    assert!(!bench.at("").exists());
}

#[tokio::test]
async fn the_rest_of_a_pod_goes_with_its_directory() {
    let bench = bench();
    bench.mount(json!([{"name": "v", "emptyDir": {}}])).await.expect("mounted");
    fs::write(bench.at("volumes/kubernetes.io~empty-dir/v/data"), "x").expect("a file");
    fs::create_dir_all(bench.at("containers/c")).expect("directories");
    fs::write(bench.at("containers/c/12345678"), "x").expect("a file");
    fs::write(bench.at("etc-hosts"), "x").expect("a file");
    fs::create_dir_all(bench.at("volume-subpaths/v/c/0")).expect("directories");
    fs::write(bench.at("volume-subpaths/v/c/1"), "").expect("a file");
    bench.manager.remove_directory(&"u".into()).await.expect("removed: the volume is our own");
    assert_eq!(bench.manager.pods_on_disk().await, []);
    bench.manager.remove_directory(&"u".into()).await.expect("nothing there");
    bench.manager.unmount(&"u".into()).await.expect("nothing there");
}

#[tokio::test]
async fn a_uid_leads_nowhere_else() {
    let bench = bench();
    fs::write(bench.dir.path().join("keep"), "x").expect("a file");
    for uid in ["..", "../pods", "a/b", ""] {
        assert!(bench.manager.remove_directory(&uid.into()).await.is_err(), "{uid}");
        assert!(bench.manager.unmount(&uid.into()).await.is_err(), "{uid}");
    }
    assert!(bench.dir.path().join("keep").exists());
}

#[tokio::test]
async fn mounts_below_stop_the_removal() {
    // Needs root: mounts a tmpfs.
    let bench = bench();
    bench.mount(json!([{"name": "v", "emptyDir": {}}])).await.expect("mounted");
    let volume = bench.at("volumes/kubernetes.io~empty-dir/v");
    let target = volume.join("inner");
    fs::create_dir(&target).expect("a directory");
    if rustix::mount::mount("none", &target, "tmpfs", rustix::mount::MountFlags::empty(), None).is_err() {
        eprintln!("skipped: no permission to mount");
        return;
    }
    fs::write(target.join("data"), "x").expect("a file");
    let refused = bench.manager.remove_directory(&"u".into()).await.expect_err("mounted").to_string();
    assert!(refused.starts_with("mounted volumes=["), "{refused}");
    assert!(bench.manager.unmount(&"u".into()).await.is_err(), "nor by taking down");
    assert!(berth_sys::tree_removal::remove_tree(&target).is_err(), "a mount is not crossed");
    assert!(target.join("data").exists());
    berth_sys::mount::unmount(&target).expect("unmounted");
    bench.manager.unmount(&"u".into()).await.expect("nothing is mounted");
    assert!(!volume.exists());
}

fn config_map(rest: Value) -> Value {
    let mut source = json!({"name": "cm", "defaultMode": 0o644});
    source.as_object_mut().expect("an object").extend(rest.as_object().expect("an object").clone());
    json!([{"name": "c", "configMap": source}])
}

#[tokio::test]
async fn a_config_map_is_shown_and_followed() {
    // AC-07-5
    let bench = bench();
    bench.world.put("cm", &[("a", "1"), ("b", "2")]);
    let mounted = bench.mount(config_map(json!({}))).await.expect("mounted");
    let volume = bench.at("volumes/kubernetes.io~configmap/c");
    assert!(mounted.by_name["c"].read_only && bench.at("plugins/kubernetes.io~empty-dir/wrapped_c/ready").exists());
    let read = |name: &str| fs::read_to_string(volume.join(name)).expect(name);
    assert_eq!((read("a"), read("b"), mode(&volume.join("a"))), ("1".into(), "2".into(), 0o644));
    let version = fs::read_link(volume.join("..data")).expect("a link");
    bench.mount(config_map(json!({}))).await.expect("again");
    assert_eq!(fs::read_link(volume.join("..data")).expect("a link"), version, "nothing changed");
    bench.world.put("cm", &[("a", "new"), ("b", "2")]);
    bench.mount(config_map(json!({}))).await.expect("refreshed");
    assert_eq!((read("a"), volume.join(&version).exists()), ("new".into(), false));
    // AC-07-6
    locked(&bench.world.config_maps).clear();
    let mounted = bench.mount(config_map(json!({}))).await.expect("its pod goes on");
    assert!(mounted.by_name["c"].host_path.is_some() && read("a") == "new");
    let event = "FailedMount MountVolume.SetUp failed for volume \"c\" : configmap \"cm\" not found";
    assert_eq!(*locked(&bench.world.events), [event]);
    bench.manager.unmount(&"u".into()).await.expect("unmounted");
    assert!(!volume.exists());
}

#[tokio::test]
async fn items_map_keys_to_files() {
    let bench = bench();
    bench.world.put("cm", &[("a", "1"), ("b", "2")]);
    let items = json!([{"key": "a", "path": "x/y", "mode": 0o400}, {"key": "a", "path": "z"}]);
    bench.mount(config_map(json!({"items": items}))).await.expect("mounted");
    let volume = bench.at("volumes/kubernetes.io~configmap/c");
    assert_eq!((mode(&volume.join("x/y")), mode(&volume.join("z"))), (0o400, 0o644));
    assert!(!volume.join("b").exists());
    let cause = |error: String| error.rsplit_once(" : ").expect("a cause").1.to_owned();
    let missing = json!([{"key": "none", "path": "n"}]);
    for (source, text) in [
        (json!({"items": missing}), "configmap references non-existent config key: none"),
        (json!({"name": "none"}), "configmap \"none\" not found"),
        (json!({"defaultMode": null}), "no defaultMode used, not even the default value for it"),
        (json!({"items": [{"key": "a", "path": "..foo"}]}), "invalid path: must not start with '..': ..foo"),
    ] {
        let mut volume = config_map(source);
        volume[0]["name"] = "other".into();
        assert_eq!(cause(bench.mount(volume).await.expect_err(text)), text);
    }
    // AC-07-7: no file of it exists.
    let other = bench.at("volumes/kubernetes.io~configmap/other");
    assert_eq!(fs::read_dir(other).expect("made").count(), 0);
    for source in [json!({"name": "none", "optional": true}), json!({"items": missing, "optional": true})] {
        bench.mount(config_map(source)).await.expect("optional");
        let names: Vec<String> = fs::read_dir(&volume)
            .expect("readable")
            .map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned())
            .filter(|name| !name.starts_with("..2"))
            .collect();
        assert_eq!(names, ["..data"], "an empty payload is a payload");
    }
    let secret = |name: &str, items: Value| json!([{"name": "s", "secret": {"secretName": name, "defaultMode": 256, "items": items}}]);
    locked(&bench.world.secrets).insert("sec".into(), [("k".to_owned(), vec![0, 255])].into());
    bench.mount(secret("sec", json!([]))).await.expect("mounted");
    let file = bench.at("volumes/kubernetes.io~secret/s/k");
    assert_eq!((fs::read(&file).expect("readable"), mode(&file)), (vec![0, 255], 0o400));
    bench.manager.unmount(&"u".into()).await.expect("unmounted");
    let failed = bench.mount(secret("none", json!([]))).await.expect_err("missing");
    assert_eq!(cause(failed), "secret \"none\" not found");
    let failed = bench.mount(secret("sec", missing.clone())).await.expect_err("missing");
    assert_eq!(cause(failed), "references non-existent secret key: none");
}

/// The projected volume that every pod of a cluster mounts.
fn access(pod: Value) -> Arc<Pod> {
    let sources = json!([
        {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}}]);
    let mut object = json!({
        "metadata": {"name": "p", "namespace": "n", "uid": "u"},
        "spec": {
            "volumes": [{"name": "kube-api-access-x", "projected": {"defaultMode": 0o644, "sources": sources}}],
            "containers": [{"name": "c", "volumeMounts": [
                {"name": "kube-api-access-x", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}]}]},
    });
    object["spec"].as_object_mut().expect("an object").extend(pod.as_object().expect("an object").clone());
    Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"))
}

#[tokio::test]
async fn the_access_of_a_pod_to_the_api() {
    let bench = bench();
    let mount = async |pod: Value| bench.manager.mount(&access(pod)).await.map_err(|e| e.to_string());
    let failed = mount(json!({})).await.expect_err("nothing is there");
    let both = "[failed to fetch token: no, configmap \"kube-root-ca.crt\" not found]";
    assert!(failed.ends_with(both), "all errors are reported: {failed}");
    bench.world.put("kube-root-ca.crt", &[("ca.crt", "PEM")]);
    *locked(&bench.world.token) = Some("t1".into());
    mount(json!({})).await.expect("mounted");
    let volume = bench.at("volumes/kubernetes.io~projected/kube-api-access-x");
    let read = |name: &str| fs::read_to_string(volume.join(name)).expect(name);
    assert_eq!((read("token"), read("ca.crt"), read("namespace")), ("t1".into(), "PEM".into(), "n".into()));
    assert_eq!((mode(&volume.join("token")), mode(&volume.join("ca.crt"))), (0o644, 0o644));
    let asked = TokenRequest { audience: String::new(), expiration_seconds: Some(3607) };
    assert_eq!(locked(&bench.world.asked).last(), Some(&asked));
    *locked(&bench.world.token) = Some("t2".into());
    mount(json!({})).await.expect("refreshed");
    assert_eq!(read("token"), "t2");
    // AC-07-12: a token that cannot be renewed stays.
    *locked(&bench.world.token) = None;
    mount(json!({})).await.expect("its pod goes on");
    assert_eq!((read("token"), locked(&bench.world.events).len()), ("t2".into(), 1));
}

#[tokio::test]
async fn what_is_stored_does_not_wait_for_what_is_issued() {
    let world = World { issuing: Some(tokio::sync::Semaphore::new(0)), ..World::default() };
    let bench = bench_of(tempfile::tempdir().expect("a directory"), CredentialStorage::OnDisk, world);
    bench.world.put("c", &[("key", "1")]);
    *locked(&bench.world.token) = Some("t1".into());
    let volumes = json!([
        {"name": "t", "projected": {"defaultMode": 420, "sources": [{"serviceAccountToken": {"path": "token"}}]}},
        {"name": "c", "configMap": {"name": "c", "defaultMode": 420}}]);
    let mount = bench.mount(volumes);
    tokio::pin!(mount);
    let file = bench.at("volumes/kubernetes.io~configmap/c/key");
    let is_there = async {
        while !file.exists() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        done = &mut mount => panic!("without the token: {done:?}"),
        () = is_there => {}
        () = tokio::time::sleep(Duration::from_secs(60)) => panic!("the config map waits for the token"),
    }
    bench.world.issuing.as_ref().expect("made above").add_permits(1);
    let mounted = mount.await.expect("mounted");
    assert_eq!(mounted.by_name.len(), 2);
    assert!(bench.at("volumes/kubernetes.io~projected/t/token").exists());
}

#[tokio::test]
async fn a_token_on_disk_is_adopted_once_by_the_token_cache() {
    // AC-10a-38: row 9
    let bench = bench();
    bench.world.put("kube-root-ca.crt", &[("ca.crt", "PEM")]);
    *locked(&bench.world.token) = Some("t1".into());
    for _ in 0..2 {
        bench.manager.mount(&access(json!({}))).await.expect("mounted");
    }
    assert!(locked(&bench.world.adopted).is_empty(), "it is known who wrote it");
    let bench = bench_in(bench.dir, CredentialStorage::OnDisk);
    bench.world.put("kube-root-ca.crt", &[("ca.crt", "PEM")]);
    *locked(&bench.world.token) = Some("t1".into());
    for _ in 0..2 {
        bench.manager.mount(&access(json!({}))).await.expect("mounted");
    }
    let ask = TokenRequest { audience: String::new(), expiration_seconds: Some(3607) };
    assert_eq!(*locked(&bench.world.adopted), [(ask, "t1".to_owned())]);

    // A file that is too long for a token is not read.
    let volume = bench.at("volumes/kubernetes.io~projected/kube-api-access-x");
    let version = volume.join(fs::read_link(volume.join("..data")).expect("a version"));
    let token = version.join("token");
    let mut dir = bench.dir;
    let makers: [fn(&Path); 4] = [
        |token| symlink("/etc/hostname", token).expect("a link"),
        |token| fs::write(token, vec![b'a'; 64 * 1024 + 1]).expect("written"),
        |token| fs::write(token, [0xff, 0xfe]).expect("written"),
        |token| nix::unistd::mkfifo(token, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO"),
    ];
    for make in makers {
        fs::remove_file(&token).expect("removed");
        make(&token);
        let bench = bench_in(dir, CredentialStorage::OnDisk);
        // No token is available: the existing one stays.
        bench.manager.mount(&access(json!({}))).await.expect("its pod goes on");
        assert!(locked(&bench.world.adopted).is_empty());
        dir = bench.dir;
    }
}

#[tokio::test]
async fn a_token_belongs_to_the_user_and_group_of_the_pod() {
    let bench = bench();
    bench.world.put("kube-root-ca.crt", &[("ca.crt", "PEM")]);
    *locked(&bench.world.token) = Some("t".into());
    let token = bench.at("volumes/kubernetes.io~projected/kube-api-access-x/token");
    let own = fs::metadata(bench.dir.path()).expect("metadata");
    let shown = || {
        let meta = fs::metadata(&token).expect("metadata");
        (meta.mode() & 0o7777, meta.uid(), meta.gid())
    };
    for (context, expected) in [
        // AC-07-10
        (json!({"runAsUser": own.uid()}), (0o600, own.uid(), own.gid())),
        // AC-07-11
        (json!({"runAsUser": own.uid(), "fsGroup": own.gid()}), (0o640, own.uid(), own.gid())),
        (json!({"fsGroup": own.gid()}), (0o640, own.uid(), own.gid())),
        (json!({}), (0o644, own.uid(), own.gid())),
    ] {
        bench.manager.mount(&access(json!({"securityContext": context}))).await.expect("mounted");
        assert_eq!(shown(), expected, "{context}");
        bench.manager.unmount(&"u".into()).await.expect("unmounted");
    }
    if rustix::process::geteuid().is_root() {
        bench
            .manager
            .mount(&access(json!({"securityContext": {"runAsUser": 1000, "fsGroup": 2000}})))
            .await
            .expect("mounted");
        assert_eq!(shown(), (0o640, 1000, 2000));
    } else {
        println!("skipped the part of other users: only root gives files away");
    }
}

#[tokio::test]
async fn without_an_api_server_objects_are_refused_in_the_reference_words() {
    let bench = bench();
    bench.world.standalone.store(true, std::sync::atomic::Ordering::Relaxed);
    let failed = bench.mount(config_map(json!({}))).await.expect_err("standalone");
    assert!(failed.ends_with(" : not supported due to running kubelet in standalone mode"), "{failed}");
    let failed = bench.manager.mount(&access(json!({}))).await.expect_err("standalone").to_string();
    let text = " : cannot setup projected volume kube-api-access-x because kube client is not configured";
    assert!(failed.ends_with(text), "{failed}");
}

#[tokio::test]
async fn credentials_lie_in_memory() {
    // Needs root: mounts a tmpfs.
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: no permission to mount");
        return;
    }
    let bench = bench_with(CredentialStorage::InMemory);
    bench.world.put("kube-root-ca.crt", &[("ca.crt", "PEM")]);
    *locked(&bench.world.token) = Some("t".into());
    let volume = bench.at("volumes/kubernetes.io~projected/kube-api-access-x");
    let in_memory = || {
        let mounts = berth_sys::mount_table::below(bench.dir.path()).expect("readable");
        mounts.iter().filter(|mount| mount.kind == "tmpfs" && mount.target == volume).count()
    };
    for _ in 0..2 {
        bench.manager.mount(&access(json!({}))).await.expect("mounted");
        assert_eq!(in_memory(), 1, "mounted once");
    }
    assert_eq!(fs::read_to_string(volume.join("token")).expect("readable"), "t");
    bench.manager.unmount(&"u".into()).await.expect("unmounted");
    assert!(in_memory() == 0 && !volume.exists());
    // A pod that was removed while no agent ran leaves nothing.
    bench.manager.mount(&access(json!({}))).await.expect("mounted");
    bench.manager.remove_directory(&"u".into()).await.expect("removed");
    assert!(in_memory() == 0 && !bench.at("").exists());
}
