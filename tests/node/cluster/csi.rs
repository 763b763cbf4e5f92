//! CSI volumes from claim to container and back, with agents killed between steps.
//!
//! Spec 07 §12, §6; spec 10a §9.

use std::{fs, path::PathBuf, process::Command, sync::Arc};

use berth_proto::csi::node_service_capability::rpc::Type as Capability;
use berth_sys::failpoint;
use serde_json::{Value, json};

use crate::cluster::{ClusterFixture, NAMESPACE, a_moment, pod_of};
use berth_testkit::{
    api_server::ApiServer,
    csi::{CsiDriver, DriverProperties, Fault, Plugin, mounts_below},
    process::{Agent, NODE, skips},
};

const DRIVER: &str = "disk.example.com";
const VOLUME: &str = "kubernetes.io/csi/disk.example.com^h";
const DATA: &str = "precious";

/// Patches a status as controllers do.
fn patch_status(api: &ApiServer, (resource, namespace, name): (&str, &str, &str), patch: Value) {
    let outcome = api.admin().patch_sub(resource, namespace, name, "status", patch);
    outcome.unwrap_or_else(|refusal| panic!("refused: {refusal:?}"));
}

/// A cluster with a driver, and one volume with data.
struct Storage {
    world: ClusterFixture,
    driver: CsiDriver,
    plugin: Plugin,
}

impl Storage {
    async fn new(attached: bool) -> Self {
        Self::of("Filesystem", attached).await
    }

    async fn of(mode: &str, attached: bool) -> Self {
        let mut world = ClusterFixture::new().await;
        let steps = world.home.path().join("steps");
        world.home = world.home.environment(failpoint::VARIABLE, steps.display().to_string());
        let root = world.home.root();
        let driver = CsiDriver::start(DriverProperties::of(DRIVER), &root, &world.home.path().join("disks")).await;
        fs::write(driver.volume("h").join("file"), DATA).expect("written");
        let plugin = Plugin::csi(&root.join("plugins_registry/disk-reg.sock"), DRIVER, &driver.endpoint, &["1.9.0"]);
        let object = |kind: &str, version: &str, name: &str, rest: Value| {
            let mut object = json!({"apiVersion": version, "kind": kind, "metadata": {"name": name}});
            for (key, value) in rest.as_object().expect("an object") {
                object[key] = value.clone();
            }
            object
        };
        world.api.create(object(
            "CSIDriver",
            "storage.k8s.io/v1",
            DRIVER,
            json!({"spec": {
            "attachRequired": attached, "podInfoOnMount": true, "fsGroupPolicy": "File",
            "volumeLifecycleModes": ["Persistent"]}}),
        ));
        let volume = world.api.create(object(
            "PersistentVolume",
            "v1",
            "pv",
            json!({"spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "volumeMode": mode,
            "persistentVolumeReclaimPolicy": "Retain", "csi": {"driver": DRIVER, "volumeHandle": "h"}}}),
        ));
        let mut claim = object(
            "PersistentVolumeClaim",
            "v1",
            "claim",
            json!({"spec": {
            "accessModes": ["ReadWriteOnce"], "volumeName": "pv", "volumeMode": mode,
            "resources": {"requests": {"storage": "1Gi"}}}}),
        );
        claim["metadata"]["namespace"] = json!(NAMESPACE);
        let mut claim = (*world.api.create(claim)).clone();
        claim["status"] = json!({"phase": "Bound", "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"]});
        patch_status(&world.api, ("persistentvolumeclaims", NAMESPACE, "claim"), json!({"status": claim["status"]}));
        let bound = json!({"spec": {"claimRef": {"kind": "PersistentVolumeClaim", "namespace": NAMESPACE,
            "name": "claim", "uid": claim["metadata"]["uid"]}}});
        world.api.patch("persistentvolumes", "", "pv", bound);
        drop(volume);
        Self { world, driver, plugin }
    }

    /// A pod that uses the claim.
    fn pod(&self, name: &str) -> Value {
        pod_of(
            name,
            json!({"containers": [{"name": "main", "volumeMounts": [{"name": "disk", "mountPath": "/disk"}]}],
                "volumes": [{"name": "disk", "persistentVolumeClaim": {"claimName": "claim"}}]}),
        )
    }

    fn run(&self, name: &str) -> Arc<Value> {
        self.world.run(self.pod(name))
    }

    fn target(&self, pod: &Value) -> PathBuf {
        let uid = pod["metadata"]["uid"].as_str().expect("a UID");
        self.world.home.root().join("pods").join(uid).join("volumes/kubernetes.io~csi/pv/mount")
    }

    /// Makes the agent exit at that step.
    fn ends_at(&self, step: &str) {
        fs::write(self.world.home.path().join("steps"), format!("{step} kill")).expect("written");
    }

    /// Mounts and records of volumes.
    fn left(&self) -> Vec<PathBuf> {
        let root = self.world.home.root();
        let staged = root.join("plugins/kubernetes.io/csi").join(DRIVER);
        let mut left = mounts_below(&staged);
        left.extend(mounts_below(&root.join("pods")).into_iter().filter(|path| path.ends_with("mount")));
        let records = fs::read_dir(&staged).into_iter().flatten().flatten().map(|entry| entry.path());
        left.extend(records);
        left
    }

    async fn until_clean(&self, agent: &Agent, what: &str) {
        agent.until(&format!("nothing is left after {what}: {:?}", self.left()), async || self.left().is_empty()).await;
        let kept = fs::read_to_string(self.driver.volume("h").join("file")).expect("kept");
        assert_eq!(kept, DATA, "{what}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_is_attached_staged_published_and_all_of_it_undone() {
    // AC-07-20, AC-07-21, AC-07-23
    if skips("a_claim_is_attached_staged_published_and_all_of_it_undone") {
        return;
    }
    let storage = Storage::new(true).await;
    let (world, driver) = (&storage.world, &storage.driver);
    let agent = world.start().await;
    storage.plugin.registered().await;
    world
        .until(&agent, "the driver stands in the CSINode", |seen| {
            seen.object("csinodes.storage.k8s.io", "", NODE)
                .is_some_and(|node| node["spec"]["drivers"][0]["name"] == DRIVER)
        })
        .await;
    let node = world.api.get("nodes", "", NODE).expect("there");
    let ids = format!("{{\"{DRIVER}\":\"{DRIVER}-node\"}}");
    assert_eq!(node["metadata"]["annotations"]["csi.volume.kubernetes.io/nodeid"], ids);

    let pod = storage.run("holder");
    // The controller attaches volumes that the node reports in use.
    world
        .until(&agent, "the volume is told to be in use", |seen| {
            seen.object("nodes", "", NODE).is_some_and(|node| node["status"]["volumesInUse"] == json!([VOLUME]))
        })
        .await;
    assert!(driver.mutating_calls().is_empty(), "{:?}", driver.mutating_calls());
    let name = attachment();
    world.api.create(json!({"apiVersion": "storage.k8s.io/v1", "kind": "VolumeAttachment", "metadata": {"name": name},
        "spec": {"attacher": DRIVER, "nodeName": NODE, "source": {"persistentVolumeName": "pv"}}}));
    let attached = json!({"status": {"attached": true, "attachmentMetadata": {"device": "sda"}}});
    patch_status(&world.api, ("volumeattachments.storage.k8s.io", "", &name), attached);
    let node_status = json!({"status": {"volumesAttached": [{"name": VOLUME, "devicePath": ""}]}});
    patch_status(&world.api, ("nodes", "", NODE), node_status);
    world.until_ready(&agent, "holder").await;
    let file = storage.target(&pod).join("file");
    assert_eq!(fs::read_to_string(&file).expect("readable"), DATA);
    assert_eq!(driver.mutating_calls(), ["NodeStageVolume", "NodePublishVolume"]);
    let publish = &driver.of("NodePublishVolume")[0];
    assert_eq!(publish.rest["publishContext"], json!({"device": "sda"}));
    assert_eq!(publish.rest["volumeContext"]["csi.storage.k8s.io/pod.name"], "holder");

    // The driver reports the usage, for the claim's series.
    for (name, value) in [("capacity_bytes", 1000), ("available_bytes", 990), ("used_bytes", 10), ("inodes_used", 10)] {
        let line = format!(
            "kubelet_volume_stats_{name}{{namespace=\"{NAMESPACE}\",persistentvolumeclaim=\"claim\"}} {value}\n"
        );
        agent.until(&line, async || agent.metrics().await.contains(&line)).await;
    }

    // Another agent reconstructs the volume of this one.
    agent.kill().await;
    let started = world.runtime.cri.count("start_container");
    let agent = world.home.start().await;
    driver.until("published again", |driver| driver.of("NodePublishVolume").len() == 2).await;
    world.until_ready(&agent, "holder").await;
    assert!(driver.of("NodeUnpublishVolume").is_empty());
    assert_eq!(world.runtime.cri.count("start_container"), started, "nothing is restarted");
    assert_eq!(fs::read_to_string(&file).expect("readable"), DATA);

    // And unmounts volumes that no pod uses any more.
    agent.kill().await;
    world.api.delete("pods", NAMESPACE, "holder", Some(0));
    let agent = world.home.start().await;
    driver
        .until("unstaged", |driver| driver.mutating_calls().ends_with(&["NodeUnpublishVolume", "NodeUnstageVolume"]))
        .await;
    storage.until_clean(&agent, "a pod that went while nobody looked").await;
    world
        .until(&agent, "no volume is in use", |seen| {
            seen.object("nodes", "", NODE)
                .is_some_and(|node| node["status"]["volumesInUse"].as_array().is_none_or(Vec::is_empty))
        })
        .await;
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abnormal_volume_is_reported_without_scrapes() {
    // Spec 05 §10, 04b §7.2, 07 §12.8
    if skips("an_abnormal_volume_is_reported_without_scrapes") {
        return;
    }
    let mut storage = Storage::new(false).await;
    let config = json!({"featureGates": {"CSIVolumeHealth": true}, "volumeStatsAggPeriod": "1s"});
    storage.world.home = storage.world.home.with(config);
    storage.driver.nature(|nature| {
        nature.capabilities.push(Capability::VolumeCondition);
        nature.condition = Some((true, "a disk is broken".to_owned()));
    });
    let world = &storage.world;
    let agent = world.start().await;
    storage.plugin.registered().await;
    storage.run("holder");
    world.until_ready(&agent, "holder").await;
    world.until_event(&agent, "VolumeConditionAbnormal", "Volume disk: a disk is broken").await;
    let line = format!(
        "kubelet_volume_stats_health_status_abnormal{{namespace=\"{NAMESPACE}\",persistentvolumeclaim=\"claim\"}} 1\n"
    );
    agent.until(&line, async || agent.metrics().await.contains(&line)).await;
    storage.driver.nature(|nature| nature.condition = None);
    let line = line.replace(" 1\n", " 0\n");
    agent.until(&line, async || agent.metrics().await.contains(&line)).await;
}

/// Does not wait two minutes for the attachment: another volume of the pod fails at once, and with it the wait for
/// both.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_whose_volume_the_node_has_no_room_for_is_rejected() {
    // Spec 07 §5.1
    if skips("a_pod_whose_volume_the_node_has_no_room_for_is_rejected") {
        return;
    }
    let storage = Storage::new(true).await;
    let (world, driver) = (&storage.world, &storage.driver);
    let period = json!({"spec": {"nodeAllocatableUpdatePeriodSeconds": 3_600}});
    world.api.patch("csidrivers.storage.k8s.io", "", DRIVER, period);
    driver.nature(|nature| nature.max_volumes = 5);
    let agent = world.start().await;
    storage.plugin.registered().await;
    let count = |expected: i64| {
        move |seen: &berth_testkit::api_server::ConditionContext<'_>| {
            let node = seen.object("csinodes.storage.k8s.io", "", NODE);
            node.is_some_and(|node| node["spec"]["drivers"][0]["allocatable"]["count"] == expected)
        }
    };
    world.until(&agent, "the node takes 5 volumes", count(5)).await;
    let name = attachment();
    world.api.create(json!({"apiVersion": "storage.k8s.io/v1", "kind": "VolumeAttachment", "metadata": {"name": name},
        "spec": {"attacher": DRIVER, "nodeName": NODE, "source": {"persistentVolumeName": "pv"}}}));
    let error = json!({"message": "no room", "errorCode": 8, "time": "2026-01-01T00:00:00Z"});
    let refused = json!({"status": {"attached": false, "attachError": error}});
    patch_status(&world.api, ("volumeattachments.storage.k8s.io", "", &name), refused);
    driver.nature(|nature| nature.max_volumes = 4);
    let mut pod = storage.pod("one-too-many");
    let other = json!({"name": "other", "persistentVolumeClaim": {"claimName": "nowhere"}});
    pod["spec"]["volumes"].as_array_mut().expect("volumes").push(other);
    let mount = json!({"name": "other", "mountPath": "/other"});
    pod["spec"]["containers"][0]["volumeMounts"].as_array_mut().expect("mounts").push(mount);
    world.run(pod);
    let pod = world.until_pod(&agent, "one-too-many", "is rejected", |pod| pod["status"]["phase"] == "Failed").await;
    assert_eq!(pod["status"]["reason"], "VolumeAttachmentLimitExceeded");
    let message = pod["status"]["message"].as_str().unwrap_or_default();
    let expected = "Pod was rejected: Node has reached its volume attachment limit, rejecting pod. \
                    unmounted volumes=[disk other], unattached volumes=[disk], failed to process volumes=[other]: ";
    assert!(message.starts_with(expected), "{message}");
    world.until(&agent, "the node is told to take fewer", count(4)).await;
    assert!(driver.mutating_calls().is_empty(), "{:?}", driver.mutating_calls());
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_deleted_while_its_driver_mounts_leaves_nothing() {
    // Spec 07 §2.3: a call whose outcome is unknown is undone.
    if skips("a_pod_deleted_while_its_driver_mounts_leaves_nothing") {
        return;
    }
    let storage = Storage::new(false).await;
    let (world, driver) = (&storage.world, &storage.driver);
    let agent = world.start().await;
    storage.plugin.registered().await;
    for (method, name) in [("NodeStageVolume", "staged"), ("NodePublishVolume", "published")] {
        driver.fail(method, 1, Fault::Hang);
        let before = driver.of(method).len();
        storage.run(name);
        driver.until("it hangs", |driver| driver.of(method).len() > before).await;
        world.api.delete("pods", NAMESPACE, name, Some(0));
        // Its pod is gone, and the driver completes the call nevertheless.
        driver.release();
        world.until_gone(&agent, name).await;
        storage.until_clean(&agent, &format!("{method} of a pod that is gone")).await;
    }
    // The volume is usable again.
    let pod = storage.run("next");
    world.until_ready(&agent, "next").await;
    assert_eq!(fs::read_to_string(storage.target(&pod).join("file")).expect("readable"), DATA);
    drop(agent);
}

/// Name of the VolumeAttachment, as the controller derives it.
fn attachment() -> String {
    use sha2::{Digest, Sha256};
    let digest = Sha256::digest(format!("h{DRIVER}{NODE}").as_bytes());
    format!("csi-{}", digest.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
}

/// A loop device on a file of the driver's volume, used as a block volume.
struct Loop(PathBuf);

impl Loop {
    fn new(storage: &Storage) -> Option<Self> {
        let volume = storage.driver.volume("h");
        fs::File::options().write(true).open(volume.join("file")).and_then(|f| f.set_len(1 << 20)).expect("a disk");
        let made = Command::new("losetup").args(["--find", "--show"]).arg(volume.join("file")).output().ok()?;
        let device = PathBuf::from(String::from_utf8_lossy(&made.stdout).trim());
        fs::write(volume.join("device"), device.display().to_string()).expect("written");
        made.status.success().then_some(Self(device))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status(); // it may not be attached
    }
}

/// Mounts, links, locks, and records of block volumes.
fn devices_left(storage: &Storage) -> Vec<String> {
    let root = storage.world.home.root();
    let own = root.join("plugins/kubernetes.io/csi/volumeDevices");
    let mut left = mounts_below(&own);
    for directory in ["pv", "staging/pv", "publish/pv"] {
        left.extend(Some(own.join(directory)).filter(|path| path.symlink_metadata().is_ok()));
    }
    for pod in fs::read_dir(root.join("pods")).into_iter().flatten().flatten() {
        let link = pod.path().join("volumeDevices/kubernetes.io~csi/pv");
        left.extend(Some(link).filter(|path| path.symlink_metadata().is_ok()));
    }
    let mut left: Vec<String> = left.iter().map(|path| path.display().to_string()).collect();
    for block in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
        let file = fs::read_to_string(block.path().join("loop/backing_file")).unwrap_or_default();
        left.extend(file.starts_with(&own.display().to_string()).then_some(file));
    }
    left
}

const DEVICE_THERE: [&str; 8] = [
    "csi.stage.recorded",
    "csi.stage.called",
    "block.marked",
    "csi.publish.recorded",
    "csi.publish.called",
    "block.bound",
    "block.linked",
    "block.pinned",
];
const DEVICE_BACK: [&str; 10] = [
    "block.released",
    "block.unlinked",
    "block.unbound",
    "csi.unpublish.begun",
    "csi.unpublish.called",
    "block.forgotten",
    "csi.unstage.begun",
    "csi.unstage.called",
    "csi.unstage.unlinked",
    "csi.unstage.forgotten",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_ends_between_two_steps_of_a_device_leaks_nothing() {
    let test = "an_agent_that_ends_between_two_steps_of_a_device_leaks_nothing";
    if skips(test) {
        return;
    }
    let storage = Storage::of("Block", false).await;
    let Some(_disk) = Loop::new(&storage) else {
        println!("skipped: {test}: this machine has no loop devices");
        return;
    };
    let run = |name: &str| {
        let mut pod = storage.pod(name);
        let main = &mut pod["spec"]["containers"][0];
        main["volumeDevices"] = json!([{"name": "disk", "devicePath": "/dev/disk"}]);
        main["volumeMounts"] = json!([]);
        storage.world.run(pod)
    };
    let until_clean = async |agent: &Agent, what: &str| {
        let is_clean = async || devices_left(&storage).is_empty();
        agent.until(&format!("nothing is left after {what}"), is_clean).await;
        let disk = fs::read(storage.driver.volume("h").join("file")).expect("kept");
        assert!(disk.starts_with(DATA.as_bytes()), "{what}");
    };
    let world = &storage.world;
    let mut agent = world.start().await;
    storage.plugin.registered().await;
    for step in DEVICE_THERE {
        storage.ends_at(step);
        run("goes");
        agent.end().await;
        drop(agent);
        world.api.delete("pods", NAMESPACE, "goes", Some(0));
        agent = world.home.start().await;
        until_clean(&agent, &format!("{step}, and its pod is gone")).await;
    }
    for step in DEVICE_BACK {
        run("ends");
        world.until_ready(&agent, "ends").await;
        storage.ends_at(step);
        world.api.delete("pods", NAMESPACE, "ends", Some(1));
        agent.end().await;
        drop(agent);
        agent = world.home.start().await;
        world.until_gone(&agent, "ends").await;
        until_clean(&agent, step).await;
    }
    drop(agent);
}

/// Steps of a mount.
const THERE: [&str; 5] =
    ["csi.stage.recorded", "csi.stage.called", "csi.publish.recorded", "csi.publish.called", "csi.publish.settled"];
/// Steps of an unmount.
const BACK: [&str; 10] = [
    "csi.unpublish.begun",
    "csi.unpublish.called",
    "csi.unpublish.unlinked",
    "csi.unpublish.forgotten",
    "csi.unpublish.removed",
    "csi.unstage.begun",
    "csi.unstage.called",
    "csi.unstage.unlinked",
    "csi.unstage.forgotten",
    "csi.unstage.removed",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_ends_between_two_steps_loses_and_leaks_nothing() {
    if skips("an_agent_that_ends_between_two_steps_loses_and_leaks_nothing") {
        return;
    }
    let storage = Storage::new(false).await;
    let world = &storage.world;
    let mut agent = world.start().await;
    storage.plugin.registered().await;
    for step in THERE {
        // The next agent continues the mount.
        storage.ends_at(step);
        let pod = storage.run("goes-on");
        agent.end().await;
        drop(agent);
        agent = world.home.start().await;
        world.until_ready(&agent, "goes-on").await;
        assert_eq!(fs::read_to_string(storage.target(&pod).join("file")).expect("readable"), DATA, "{step}");
        world.api.delete("pods", NAMESPACE, "goes-on", Some(1));
        world.until_gone(&agent, "goes-on").await;
        storage.until_clean(&agent, step).await;

        // The pod was deleted meanwhile.
        storage.ends_at(step);
        storage.run("goes");
        agent.end().await;
        drop(agent);
        world.api.delete("pods", NAMESPACE, "goes", Some(0));
        agent = world.home.start().await;
        storage.until_clean(&agent, &format!("{step}, and its pod is gone")).await;
    }
    for step in BACK {
        storage.run("ends");
        world.until_ready(&agent, "ends").await;
        storage.ends_at(step);
        world.api.delete("pods", NAMESPACE, "ends", Some(1));
        agent.end().await;
        drop(agent);
        agent = world.home.start().await;
        world.until_gone(&agent, "ends").await;
        storage.until_clean(&agent, step).await;
    }
    a_moment().await;
    assert!(storage.left().is_empty());
    drop(agent);
}
