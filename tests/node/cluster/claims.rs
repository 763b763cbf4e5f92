//! Persistent volume claims on local volumes: directories and loop devices.
//!
//! Local volumes are persistent volumes of the node itself (spec 07 §3.3, §4, §5, §7.6, spec 10 §4.8).

use std::{
    fs,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::cluster::{ClusterFixture, NAMESPACE, pod_of};
use berth_testkit::process::{Agent, NODE, skips};

/// A local persistent volume.
struct Local {
    path: PathBuf,
    spec: Value,
}

impl Local {
    fn at(path: &Path) -> Self {
        Self { path: path.to_owned(), spec: json!({}) }
    }

    fn with(mut self, key: &str, value: Value) -> Self {
        self.spec[key] = value;
        self
    }

    /// Creates the volume `name`, and a claim of that name bound to it.
    fn create(self, world: &ClusterFixture, name: &str) {
        claim(world, name);
        let mut spec = json!({"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"],
            "volumeMode": "Filesystem", "storageClassName": "local", "local": {"path": self.path},
            "claimRef": {"kind": "PersistentVolumeClaim", "apiVersion": "v1", "name": name, "namespace": NAMESPACE,
                         "uid": world.api.get("persistentvolumeclaims", NAMESPACE, name).expect("there")["metadata"]["uid"]},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [
                {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}]}]}}});
        for (key, value) in self.spec.as_object().expect("an object") {
            spec[key] = value.clone();
        }
        world
            .api
            .create(json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}));
        bind(world, name);
    }
}

/// Creates an unbound claim.
fn claim(world: &ClusterFixture, name: &str) {
    let spec = json!({"accessModes": ["ReadWriteOnce"], "storageClassName": "local",
        "resources": {"requests": {"storage": "1Gi"}}});
    world.api.create(json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec, "status": {"phase": "Pending"}}));
}

/// Binds a claim to the volume of its name, as the controller does.
fn bind(world: &ClusterFixture, name: &str) {
    world.api.patch("persistentvolumeclaims", NAMESPACE, name, json!({"spec": {"volumeName": name}}));
    let status =
        json!({"status": {"phase": "Bound", "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"]}});
    world.api.admin().patch_sub("persistentvolumeclaims", NAMESPACE, name, "status", status).expect("bound");
}

/// A pod that mounts the claim.
fn user(name: &str, claim: &str) -> Value {
    let mounts = json!([{"name": "v", "mountPath": "/v"}]);
    pod_of(
        name,
        json!({"containers": [{"name": "main", "volumeMounts": mounts}], "terminationGracePeriodSeconds": 1,
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": claim}}]}),
    )
}

fn uid(pod: &Value) -> &str {
    pod["metadata"]["uid"].as_str().expect("a UID")
}

/// Path of a pod's volume.
fn place(world: &ClusterFixture, pod: &Value, volume: &str) -> PathBuf {
    world.home.root().join("pods").join(uid(pod)).join("volumes/kubernetes.io~local-volume").join(volume)
}

fn events_of(world: &ClusterFixture, pod: &str, reason: &str) -> Vec<String> {
    let events = world.api.all("events");
    let is_it = |event: &&Arc<Value>| event["involvedObject"]["name"] == pod && event["reason"] == reason;
    events.iter().filter(is_it).filter_map(|event| event["message"].as_str().map(str::to_owned)).collect()
}

fn is_mounted(path: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("readable");
    mounts.lines().any(|line| line.split(' ').nth(4) == path.to_str())
}

/// A loop device on a temporary file, detached when dropped.
struct Loop {
    device: PathBuf,
    _file: tempfile::NamedTempFile,
}

impl Loop {
    /// Attaches a loop device; `None`, with a report, if the machine has none.
    fn new(test: &str) -> Option<Self> {
        let file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file().set_len(64 << 20).expect("room");
        let made = Command::new("losetup").args(["--find", "--show"]).arg(file.path()).output();
        match made {
            Ok(output) if output.status.success() => {
                let device = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
                Some(Self { device, _file: file })
            }
            other => {
                println!("skipped: {test}: needs loop devices: {other:?}");
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.device).output(); // the next test uses another device
    }
}

async fn gone(world: &ClusterFixture, agent: &Agent, pod: &str) {
    world.api.delete("pods", NAMESPACE, pod, Some(1));
    world.until_gone(agent, pod).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_is_not_bound_is_waited_for() {
    // AC-07-14, AC-10-40
    if skips("a_claim_that_is_not_bound_is_waited_for") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("data"), "kept").expect("written");
    claim(&world, "c");
    let before = world.api.last();
    let pod = world.run(user("p", "c"));
    let text = format!(
        "Unable to attach or mount volumes: unmounted volumes=[v], unattached volumes=[], failed to process \
         volumes=[v]: error processing PVC {NAMESPACE}/c: PVC is not bound"
    );
    world.until_event(&agent, "FailedMount", &text).await;
    // At most ten reads a minute, and two at first: the third comes 6 s later, less the clock difference.
    let begun = Instant::now();
    let reads = || world.agent_requests().since(before).at("persistentvolumeclaims", NAMESPACE, "c").verb("get");
    agent.until("the claim is read three times", async || reads().len() >= 3).await;
    assert!(begun.elapsed() > Duration::from_secs(4), "{:?}\n{}", begun.elapsed(), reads());
    let spec = json!({"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "volumeMode": "Filesystem",
        "local": {"path": folder.path()},
        "claimRef": {"name": "c", "namespace": NAMESPACE, "uid": world.api.get("persistentvolumeclaims", NAMESPACE, "c").expect("there")["metadata"]["uid"]}});
    world.api.create(json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "c"}, "spec": spec}));
    bind(&world, "c");
    world.until_ready(&agent, "p").await;
    let place = place(&world, &pod, "c");
    assert_eq!(fs::read_to_string(place.join("data")).expect("mounted"), "kept");
    gone(&world, &agent, "p").await;
    assert!(!is_mounted(&place) && !place.exists());
    assert_eq!(fs::read_to_string(folder.path().join("data")).expect("still there"), "kept");
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_for_one_pod_goes_to_the_next_when_that_is_gone() {
    // AC-07-16
    if skips("a_volume_for_one_pod_goes_to_the_next_when_that_is_gone") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    let folder = tempfile::tempdir().expect("a folder");
    Local::at(folder.path()).with("accessModes", json!(["ReadWriteOncePod"])).create(&world, "c");
    world.run(user("one", "c"));
    world.until_ready(&agent, "one").await;
    world.run(user("two", "c"));
    let text = "MountVolume.SetUp failed for volume \"c\" : volume uses the ReadWriteOncePod access mode and is already in use \
                by another pod";
    world.until_event(&agent, "FailedMount", text).await;
    assert!(world.runtime.cri.running("two", "main").is_empty());
    gone(&world, &agent, "one").await;
    world.until_ready(&agent, "two").await;
    assert!(events_of(&world, "two", "FailedMount").iter().all(|message| message == text));
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_with_a_claim_restarts_while_the_api_server_is_down() {
    // AC-07-32
    if skips("a_pod_with_a_claim_restarts_while_the_api_server_is_down") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    let folder = tempfile::tempdir().expect("a folder");
    Local::at(folder.path()).create(&world, "c");
    let pod = world.run(user("p", "c"));
    world.until_ready(&agent, "p").await;
    world.api.take_offline().await;
    let started = world.runtime.cri.count("start_container");
    world.end(&pod, 1);
    world.runtime.until("what ended is restarted", &agent, |cri| cri.count("start_container") == started + 1).await;
    assert!(is_mounted(&place(&world, &pod, "c")));
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_finds_existing_mounts_and_unmounts_unused_ones() {
    // AC-07-20, AC-07-21, of a volume without a driver
    if skips("a_restart_finds_existing_mounts_and_unmounts_unused_ones") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    let (kept, left) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    fs::write(left.path().join("data"), "kept").expect("written");
    Local::at(kept.path()).create(&world, "kept");
    Local::at(left.path()).create(&world, "left");
    let (stays, goes) = (world.run(user("stays", "kept")), world.run(user("goes", "left")));
    world.until_ready(&agent, "stays").await;
    world.until_ready(&agent, "goes").await;
    let (kept_place, left_place) = (place(&world, &stays, "kept"), place(&world, &goes, "left"));
    agent.kill().await;
    world.api.delete("pods", NAMESPACE, "goes", Some(0));
    let started = world.runtime.cri.count("start_container");
    let agent = world.home.start().await;
    let folder = world.home.root().join("pods").join(uid(&goes));
    agent.until("the directory of the pod that is gone goes", async || !folder.exists()).await;
    assert!(!is_mounted(&left_place));
    assert_eq!(fs::read_to_string(left.path().join("data")).expect("data is nobody's to delete"), "kept");
    assert!(is_mounted(&kept_place));
    assert_eq!(world.runtime.cri.count("start_container"), started, "nobody notices");
    gone(&world, &agent, "stays").await;
    assert!(!is_mounted(&kept_place));
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_blank_device_becomes_a_file_system() {
    let test = "a_blank_device_becomes_a_file_system";
    if skips(test) {
        return;
    }
    let Some(device) = Loop::new(test) else { return };
    let (world, agent) = ClusterFixture::joined().await;
    Local::at(&device.device).create(&world, "disk");
    let pod = world.run(user("writer", "disk"));
    world.until_ready(&agent, "writer").await;
    let (own, global) =
        (place(&world, &pod, "disk"), world.home.root().join("plugins/kubernetes.io/local-volume/mounts/disk"));
    assert!(is_mounted(&own) && is_mounted(&global));
    assert!(own.join("lost+found").is_dir(), "ext4, because nothing else was said");
    fs::write(own.join("data"), "kept").expect("written");
    gone(&world, &agent, "writer").await;
    agent.until("it is unmounted", async || !is_mounted(&global)).await;
    let again = world.run(user("reader", "disk"));
    world.until_ready(&agent, "reader").await;
    let data = place(&world, &again, "disk").join("data");
    assert_eq!(fs::read_to_string(data).expect("not formatted a second time"), "kept");
    gone(&world, &agent, "reader").await;
    agent.until("it is unmounted", async || !is_mounted(&global)).await;
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_is_given_to_its_pod_read_only() {
    // AC-07-31
    let test = "a_device_is_given_to_its_pod_read_only";
    if skips(test) {
        return;
    }
    let Some(device) = Loop::new(test) else { return };
    let (world, agent) = ClusterFixture::joined().await;
    Local::at(&device.device).with("volumeMode", json!("Block")).create(&world, "raw");
    let spec = json!({"terminationGracePeriodSeconds": 1,
        "containers": [{"name": "main", "volumeDevices": [{"name": "v", "devicePath": "/dev/v"}]}],
        "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "raw", "readOnly": true}}]});
    let pod = world.run(pod_of("p", spec));
    world.until_ready(&agent, "p").await;
    let root = world.home.root();
    let link = root.join("pods").join(uid(&pod)).join("volumeDevices/kubernetes.io~local-volume/raw");
    assert_eq!(fs::read_link(&link).expect("a link"), device.device);
    let given = world.runtime.cri.devices("p", "main");
    let given: Vec<_> =
        given.iter().map(|d| (d.host_path.as_str(), d.container_path.as_str(), d.permissions.as_str())).collect();
    assert_eq!(given, [(link.to_str().expect("text"), "/dev/v", "r")]);
    let bound = root.join("plugins/kubernetes.io~local-volume/volumeDevices/raw").join(uid(&pod));
    assert!(fs::metadata(&bound).expect("bound").file_type().is_block_device());
    let locks = || {
        let listed = Command::new("losetup").args(["--noheadings", "--output", "BACK-FILE"]).output().expect("losetup");
        String::from_utf8_lossy(&listed.stdout).lines().filter(|line| line.contains(uid(&pod))).count()
    };
    assert_eq!(locks(), 1, "something holds the device open");
    let messages = events_of(&world, "p", "SuccessfulMountVolume");
    assert!(messages.iter().any(|text| text.contains("globalMapPath")) && messages.len() == 2, "{messages:?}");
    gone(&world, &agent, "p").await;
    assert_eq!(locks(), 0);
    agent.until("nothing is left", async || !bound.exists() && fs::symlink_metadata(&link).is_err()).await;
    drop(agent);
}
