//! Devices of device plugins in real containers: environment, device nodes, device cgroup (spec 06c §1.7).

use std::{fs, sync::Arc};

use serde_json::json;

use crate::node::{Node, UNTIL_STOPPED, shell};
use berth_proto::device_plugin::{ContainerAllocateResponse, DevicePluginOptions};
use berth_testkit::{
    device_plugin::{SamplePlugin, default_response, healthy},
    process::manifest_of,
};

const GPU: &str = "example.com/gpu";

/// A device that containers cannot open without a plugin, where this machine has it; otherwise `/dev/null`.
fn guarded_device() -> &'static str {
    let fuse = "/dev/fuse";
    if fs::File::options().read(true).write(true).open(fuse).is_ok() { fuse } else { "/dev/null" }
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
    // Without the tests for a device node, the shell would create a regular file.
    let script = "echo \"devices <$EXAMPLE_COM_GPU_DEVICES>\"; \
                  [ -c /dev/d1 ] && echo x > /dev/d1 && [ -z \"$(cat /dev/d1)\" ] && echo written; \
                  [ -c /dev/d2 ] && true <> /dev/d2 && echo opened; \
                  ls /dev | grep '^d[12]$'; echo done";
    let script = format!("{script}; {UNTIL_STOPPED}");
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
