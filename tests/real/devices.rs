//! Devices of device plugins in real containers: environment, device nodes, device cgroup (spec 06c §1.7).

use std::{fs, os::unix::fs::PermissionsExt, path::Path, sync::Arc};

use serde_json::json;

use crate::node::{Node, UNTIL_STOPPED, shell};
use berth_proto::device_plugin::{ContainerAllocateResponse, DevicePluginOptions};
use berth_testkit::{
    api_server::ApiServer,
    device_plugin::{SamplePlugin, default_response, healthy},
    dra_driver::{DriverMethod, SampleDriver, V1, claim_object},
    process::{NODE, manifest_of},
    real,
};

const GPU: &str = "example.com/gpu";
const NAMESPACE: &str = "default";
/// A directory in which the embedded runtime looks for CDI specs.
const CDI_SPECS: &str = "/run/cdi";

/// Script that prints the variable of the plugin, what a container can do with its devices, and `done`.
///
/// Without the tests for a device node, the shell would create a regular file.
const DEVICE_SCRIPT: &str = "echo \"devices <$EXAMPLE_COM_GPU_DEVICES>\"; \
                             [ -c /dev/d1 ] && echo x > /dev/d1 && [ -z \"$(cat /dev/d1)\" ] && echo written; \
                             [ -c /dev/d2 ] && true <> /dev/d2 && echo opened; \
                             ls /dev | grep '^d[12]$'; echo done";

/// A device that containers cannot open without a plugin, where this machine has it for all users; else `/dev/null`.
fn guarded_device() -> &'static str {
    let fuse = "/dev/fuse";
    let is_for_all = fs::metadata(fuse).is_ok_and(|metadata| metadata.permissions().mode() & 0o6 == 0o6);
    let can_open = fs::File::options().read(true).write(true).open(fuse).is_ok();
    if is_for_all && can_open { fuse } else { "/dev/null" }
}

impl Node {
    /// Registers a plugin with the devices `d1`, a clone of `/dev/null`, and `d2`, a clone of [`guarded_device`].
    async fn start_plugin(&self) -> SamplePlugin {
        let directory = self.home.path().join("device-plugins");
        let plugin = SamplePlugin::start(&directory, "gpu.sock", GPU, DevicePluginOptions::default());
        let allocate = |ids: &[String]| -> ContainerAllocateResponse {
            let mut response = default_response(GPU, ids);
            for device in response.devices.iter_mut().filter(|device| device.container_path == "/dev/d2") {
                device.host_path = guarded_device().to_owned();
            }
            response
        };
        plugin.change_behavior(|behavior| behavior.allocate = Arc::new(allocate));
        plugin.set_devices(vec![healthy("d1"), healthy("d2")]);
        plugin.register(&directory.join("kubelet.sock")).await.expect("registered");
        // The checkpoint is written once the devices are known.
        let checkpoint = directory.join("kubelet_internal_checkpoint");
        let is_listed = async || fs::read_to_string(&checkpoint).is_ok_and(|text| text.contains(r#"["d1","d2"]"#));
        self.agent.until("the devices of the plugin are known", is_listed).await;
        plugin
    }
}

/// Only the container with a limit gets the environment variable and the device nodes, and can use them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_can_use_the_devices_of_its_plugin() {
    // AC-06c-6
    let Some(node) = Node::shared("a_container_can_use_the_devices_of_its_plugin").await else { return };
    let plugin = node.start_plugin().await;
    let script = format!("{DEVICE_SCRIPT}; {UNTIL_STOPPED}");
    let mut owner = shell("owner", &script);
    owner["resources"] = json!({"limits": {GPU: "2"}});
    let containers = json!([owner, shell("other", &script)]);
    let spec = json!({"terminationGracePeriodSeconds": 5, "containers": containers});
    let pod = node.run(&manifest_of("devices", spec)).await;
    let out = node.until_output(&pod, "owner", "done\n").await;
    assert_eq!(out, "devices <d1,d2>\nwritten\nopened\nd1\nd2\ndone\n");
    let out = node.until_output(&pod, "other", "done\n").await;
    assert_eq!(out, "devices <>\ndone\n", "a container without a limit has no device");
    node.remove(&pod).await;
    drop(plugin);
}

/// In a user namespace nobody can create device nodes: the runtime binds those of the machine.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_with_users_of_its_own_can_use_devices() {
    let test = "a_pod_with_users_of_its_own_can_use_devices";
    let Some(node) = Node::own(test).await else { return };
    if !node.runtime.has_user_namespaces() {
        println!("skipped {test}: the runtime or the kernel has no user namespaces for pods");
        return;
    }
    let plugin = node.start_plugin().await;
    let script = format!("cat /proc/self/uid_map; id -u; {DEVICE_SCRIPT}; {UNTIL_STOPPED}");
    let mut owner = shell("owner", &script);
    owner["resources"] = json!({"limits": {GPU: "2"}});
    let containers = json!([owner, shell("other", &script)]);
    let spec = json!({"terminationGracePeriodSeconds": 5, "hostUsers": false, "containers": containers});
    let pod = node.run(&manifest_of("users", spec)).await;
    for (container, expected) in
        [("owner", "0\ndevices <d1,d2>\nwritten\nopened\nd1\nd2\ndone\n"), ("other", "0\ndevices <>\ndone\n")]
    {
        let out = node.until_output(&pod, container, "done\n").await;
        let (map, rest) = out.split_once('\n').expect("a line with the map");
        let map: Vec<u32> = map.split_whitespace().map(|number| number.parse().expect("a number")).collect();
        assert!(matches!(map[..], [0, outside, 65_536] if outside >= 65_536), "{container}: {map:?}");
        assert_eq!(rest, expected, "{container}");
    }
    node.remove(&pod).await;
    drop(plugin);
}

/// The embedded runtime applies the CDI spec that a driver has written for a claim.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_has_what_the_driver_of_its_claim_prepared() {
    let test = "a_container_has_what_the_driver_of_its_claim_prepared";
    if !real::is_embedded() {
        println!("not for containerd: {test}: it has no CDI before version 1.7");
        return;
    }
    let api = ApiServer::start().await;
    let kubeconfig = format!("--kubeconfig={}", api.node_kubeconfig(NODE).display());
    let Some(node) = Node::with_flags(test, json!({}), &[kubeconfig]).await else { return };
    let driver = SampleDriver::start(&node.home.root(), "gpu.real.example.com", &[V1]);
    fs::create_dir_all(CDI_SPECS).expect("a directory");
    driver.set_cdi_directory(Path::new(CDI_SPECS));
    let registration = driver.serve_registration(&node.home.root().join("plugins_registry"));
    registration.registered().await;

    let mut main = shell("main", &format!("echo \"claim <$DRA_CLAIM>\"; {UNTIL_STOPPED}"));
    main["resources"] = json!({"claims": [{"name": "gpu"}]});
    let claims = json!([{"name": "gpu", "resourceClaimName": "one"}]);
    let spec = json!({"terminationGracePeriodSeconds": 5, "resourceClaims": claims, "containers": [main]});
    let mut pod = manifest_of("claims", spec);
    pod["metadata"]["namespace"] = json!(NAMESPACE);
    let pod = api.create(pod);
    let uid = pod["metadata"]["uid"].as_str().expect("a UID");
    let claim = |uid: &str| claim_object(NAMESPACE, "one", "", &driver.name, Some(("claims", uid)), &["gpu"]);
    api.create(claim(uid));
    let status = json!({"status": claim(uid)["status"]});
    let written = api.admin().patch_sub("resourceclaims.resource.k8s.io", NAMESPACE, "one", "status", status);
    written.unwrap_or_else(|refusal| panic!("refused: {refusal:?}"));
    api.bind(NAMESPACE, "claims", NODE);
    assert_eq!(node.until_output(&pod, "main", "claim").await, "claim <one>\n");

    api.delete("pods", NAMESPACE, "claims", None);
    driver.wait_for_calls(DriverMethod::NodeUnprepareResources, 1).await;
    node.until_nothing_is_left(&pod).await;
}
