//! CSI volumes in real containers: mounted file systems and block devices. Spec 07 §12.
//!
//! The driver implements the real contract, the container reads and writes, and nothing is left behind.

use std::{fs, path::Path, process::Command};

use serde_json::{Value, json};

use crate::node::{Node, UNTIL_STOPPED, shell};
use berth_testkit::{
    api_server::ApiServer,
    csi::{CsiDriver, DriverProperties, Plugin, mounts_below},
    process::{NODE, PATIENCE, manifest_of},
};

const DRIVER: &str = "disk.example.com";

/// A node of a cluster, with a CSI driver.
struct Cluster {
    api: ApiServer,
    driver: CsiDriver,
    node: Node,
    /// Registers the driver until dropped.
    _plugin: Plugin,
    data: tempfile::TempDir,
}

impl Cluster {
    async fn new(test: &str) -> Option<Self> {
        let api = ApiServer::start().await;
        let kubeconfig = format!("--kubeconfig={}", api.node_kubeconfig(NODE).display());
        let fields = json!({"configMapAndSecretChangeDetectionStrategy": "Watch"});
        let node = Node::with_flags(test, fields, &[kubeconfig]).await?;
        let (root, data) = (node.home.root(), tempfile::tempdir().expect("a folder"));
        let driver = CsiDriver::start(DriverProperties::of(DRIVER), &root, data.path()).await;
        let plugin = Plugin::csi(&root.join("plugins_registry/disk-reg.sock"), DRIVER, &driver.endpoint, &["1.9.0"]);
        plugin.registered().await;
        api.create(json!({"apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": {"name": DRIVER},
            "spec": {"attachRequired": false, "fsGroupPolicy": "File", "volumeLifecycleModes": ["Persistent"]}}));
        Some(Self { api, driver, node, _plugin: plugin, data })
    }

    /// Creates a volume of that name, and a claim bound to it.
    fn claim(&self, name: &str, mode: &str) {
        let modes = json!(["ReadWriteOnce"]);
        self.api.create(json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": modes, "volumeMode": mode,
            "persistentVolumeReclaimPolicy": "Retain", "csi": {"driver": DRIVER, "volumeHandle": name}}}));
        let claim = self.api.create(json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": "default"}, "spec": {"accessModes": modes, "volumeName": name,
            "volumeMode": mode, "resources": {"requests": {"storage": "1Gi"}}}}));
        let bound = json!({"spec": {"claimRef": {"kind": "PersistentVolumeClaim", "namespace": "default", "name": name,
            "uid": claim["metadata"]["uid"]}}});
        self.api.patch("persistentvolumes", "", name, bound);
        let status = json!({"status": {"phase": "Bound", "capacity": {"storage": "1Gi"}, "accessModes": modes}});
        let result = self.api.admin().patch_sub("persistentvolumeclaims", "default", name, "status", status);
        result.expect("not refused");
    }

    /// Output of a pod that uses the claim; the pod is deleted afterwards.
    async fn output(&self, claim: &str, container: Value) -> String {
        let spec = json!({"terminationGracePeriodSeconds": 5, "containers": [container],
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": claim}}]});
        let mut manifest = manifest_of("user", spec);
        manifest["metadata"]["namespace"] = json!("default");
        self.api.create(manifest);
        self.api.bind("default", "user", NODE);
        let is_ready = |pod: &Value| {
            let conditions = pod["status"]["conditions"].as_array();
            conditions.is_some_and(|all| all.iter().any(|one| one["type"] == "Ready" && one["status"] == "True"))
        };
        let ready = "the pod is Ready";
        self.api
            .wait_until(ready, PATIENCE, |seen| {
                seen.object("pods", "default", "user").is_some_and(|pod| is_ready(&pod))
            })
            .await;
        let pod = self.api.get("pods", "default", "user").expect("just seen");
        let out = self.node.until_output(&pod, "main", "done\n").await;
        self.api.delete("pods", "default", "user", Some(5));
        self.node.until_nothing_is_left(&pod).await;
        out
    }

    async fn until_undone(&self) {
        let is_over =
            |driver: &CsiDriver| driver.mutating_calls().ends_with(&["NodeUnpublishVolume", "NodeUnstageVolume"]);
        self.driver.until("unpublished and unstaged", is_over).await;
        let root = self.node.home.root();
        let left = || -> Vec<_> {
            mounts_below(&root).into_iter().filter(|path| path.display().to_string().contains("csi")).collect()
        };
        self.node.agent.until("nothing is mounted", async || left().is_empty()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_reads_and_writes_what_a_driver_mounts() {
    let Some(cluster) = Cluster::new("a_container_reads_and_writes_what_a_driver_mounts").await else { return };
    cluster.claim("disk", "Filesystem");
    let folder = cluster.driver.volume("disk");
    fs::write(folder.join("before"), "kept\n").expect("writable");
    let script = "exec 2>&1; cat /v/before; echo new > /part/after; cat /v/sub/after; echo done";
    let mut main = shell("main", &format!("{script}; {UNTIL_STOPPED}"));
    main["volumeMounts"] =
        json!([{"name": "v", "mountPath": "/v"}, {"name": "v", "mountPath": "/part", "subPath": "sub"}]);
    let out = cluster.output("disk", main).await;
    assert_eq!(out, "kept\nnew\ndone\n");
    cluster.until_undone().await;
    assert_eq!(fs::read_to_string(folder.join("sub/after")).expect("kept"), "new\n");
    let acts = ["NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume"];
    assert_eq!(cluster.driver.mutating_calls(), acts);
}

/// A loop device on a file.
struct Loop(String);

impl Loop {
    fn new(file: &Path) -> Option<Self> {
        fs::File::create(file).and_then(|file| file.set_len(1 << 20)).expect("a file");
        let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output().ok()?;
        made.status.success().then(|| Self(String::from_utf8_lossy(&made.stdout).trim().to_owned()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status(); // it may not be attached
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_reads_and_writes_the_device_that_a_driver_gives() {
    let test = "a_container_reads_and_writes_the_device_that_a_driver_gives";
    let Some(cluster) = Cluster::new(test).await else { return };
    let file = cluster.data.path().join("image");
    let Some(device) = Loop::new(&file) else {
        println!("skipped: {test}: this machine has no loop devices");
        return;
    };
    cluster.claim("raw", "Block");
    fs::write(cluster.driver.volume("raw").join("device"), &device.0).expect("writable");
    let script = "exec 2>&1; test -b /dev/v && echo 'block written' | dd of=/dev/v bs=512 conv=sync 2>/dev/null; \
                  dd if=/dev/v bs=13 count=1 2>/dev/null; echo; sync; echo done";
    let mut main = shell("main", &format!("{script}; {UNTIL_STOPPED}"));
    main["volumeDevices"] = json!([{"name": "v", "devicePath": "/dev/v"}]);
    let out = cluster.output("raw", main).await;
    assert_eq!(out, "block written\ndone\n");
    cluster.until_undone().await;
    assert!(fs::read(&file).expect("readable").starts_with(b"block written"), "it is on the disk");
}
