//! Device plugins on a cluster node: node status, allocation, health, restart, and reboot (spec 06c §1).

use std::{path::PathBuf, sync::Arc};

use serde_json::{Value, json};
use tokio::net::UnixStream;

use crate::cluster::{ClusterFixture, NAMESPACE, a_moment, pod, pod_of};
use berth_proto::device_plugin::DevicePluginOptions;
use berth_testkit::{
    device_plugin::{PluginMethod, SamplePlugin, devices_variable, healthy, unhealthy},
    plugin_server::PluginFault,
    process::{Agent, NODE, container, skips, unmount_below},
};

const GPU: &str = "example.com/gpu";

/// A cluster whose node has a device plugin for [`GPU`].
struct DeviceNode {
    world: ClusterFixture,
    plugin: SamplePlugin,
}

impl DeviceNode {
    /// Creates a cluster whose node is Ready and whose plugin has reported these devices.
    async fn joined(devices: &[(&str, bool)]) -> (Self, Agent) {
        Self::joined_with(json!({}), devices).await
    }

    /// As [`Self::joined`], with fields of the configuration.
    async fn joined_with(fields: Value, devices: &[(&str, bool)]) -> (Self, Agent) {
        let mut world = ClusterFixture::new().await;
        world.home = world.home.with(fields);
        let agent = world.start().await;
        let directory = world.home.path().join("device-plugins");
        let plugin = SamplePlugin::start(&directory, "gpu.sock", GPU, DevicePluginOptions::default());
        let mut node = Self { world, plugin };
        node.set_devices(devices);
        node.register(&agent).await;
        let allocatable = devices.iter().filter(|(_, is_healthy)| *is_healthy).count();
        node.until_capacity(&agent, devices.len(), allocatable).await;
        (node, agent)
    }

    fn set_devices(&self, devices: &[(&str, bool)]) {
        let device = |(id, is_healthy): &(&str, bool)| if *is_healthy { healthy(id) } else { unhealthy(id) };
        self.plugin.set_devices(devices.iter().map(device).collect());
    }

    fn registration_socket(&self) -> PathBuf {
        self.world.home.path().join("device-plugins/kubelet.sock")
    }

    /// Registers the plugin and waits until the agent reads its devices. The plugin listens again first if the start of
    /// the agent has removed its socket.
    async fn register(&mut self, agent: &Agent) {
        let socket = self.registration_socket();
        // The agent removes the sockets of the directory before it listens.
        agent.until("plugins can register", async || UnixStream::connect(&socket).await.is_ok()).await;
        if !self.plugin.socket.exists() {
            self.plugin.restart();
        }
        let streams = self.count(PluginMethod::ListAndWatch);
        self.plugin.register(&socket).await.expect("registered");
        self.plugin.wait_for_calls(PluginMethod::ListAndWatch, streams + 1).await;
    }

    /// Number of calls of a method of the plugin.
    fn count(&self, method: PluginMethod) -> usize {
        self.plugin.calls().iter().filter(|call| call.method() == method).count()
    }

    async fn until_capacity(&self, agent: &Agent, capacity: usize, allocatable: usize) {
        let (capacity, allocatable) = (json!(capacity.to_string()), json!(allocatable.to_string()));
        let has = |node: &Value| {
            let status = &node["status"];
            (&status["capacity"][GPU], &status["allocatable"][GPU]) == (&capacity, &allocatable)
        };
        let what = format!("the node has {capacity} devices and {allocatable} allocatable ones");
        self.world.until(agent, &what, |seen| seen.object("nodes", "", NODE).is_some_and(|node| has(&node))).await;
    }

    /// Runs a pod whose container `main` has a limit of that many devices.
    fn run(&self, name: &str, number: usize) -> Arc<Value> {
        let resources = json!({"limits": {GPU: number.to_string()}});
        self.world.run(pod_of(name, json!({"containers": [{"name": "main", "resources": resources}]})))
    }

    /// Waits until the status of a pod lists that health of one device.
    async fn until_health(&self, agent: &Agent, name: &str, device: &str, health: &str) -> Arc<Value> {
        let expected = json!([{"name": GPU, "resources": [{"resourceID": device, "health": health}]}]);
        let is_listed = |pod: &Value| container(pod, "main")["allocatedResourcesStatus"] == expected;
        self.world.until_pod(agent, name, &format!("has the device {device}, which is {health}"), is_listed).await
    }

    /// Checks environment and devices in the create request of the running container `main` of a pod.
    fn assert_has_device(&self, name: &str, device: &str) {
        let environment = self.world.runtime.cri.environment(name, "main");
        let variable = (devices_variable(GPU), device.to_owned());
        assert!(environment.contains(&variable), "{environment:?}");
        let devices = self.world.runtime.cri.devices(name, "main");
        let paths: Vec<(&str, &str, &str)> = devices
            .iter()
            .map(|device| (device.container_path.as_str(), device.host_path.as_str(), device.permissions.as_str()))
            .collect();
        assert_eq!(paths, [(format!("/dev/{device}").as_str(), "/dev/null", "rw")]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_node_status_counts_devices() {
    // AC-06c-3, AC-06c-4
    if skips("the_node_status_counts_devices") {
        return;
    }
    let (mut node, agent) = DeviceNode::joined(&[("d1", true), ("d2", true), ("d3", false)]).await;
    node.set_devices(&[("d1", true), ("d2", true), ("d3", true)]);
    node.until_capacity(&agent, 3, 3).await;
    node.plugin.stop();
    node.until_capacity(&agent, 3, 0).await;
    node.register(&agent).await;
    node.until_capacity(&agent, 3, 3).await;
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_reaches_its_container_and_its_health_the_status() {
    // AC-06c-6, spec 06c §1.10
    if skips("a_device_reaches_its_container_and_its_health_the_status") {
        return;
    }
    let (node, agent) = DeviceNode::joined(&[("d1", true), ("d2", true)]).await;
    node.run("owner", 1);
    node.world.until_ready(&agent, "owner").await;
    node.assert_has_device("owner", "d1");
    node.until_health(&agent, "owner", "d1", "Healthy").await;
    let started = node.world.runtime.cri.count("start_container");
    node.set_devices(&[("d1", false), ("d2", true)]);
    node.until_health(&agent, "owner", "d1", "Unhealthy").await;
    node.until_capacity(&agent, 2, 1).await;
    node.set_devices(&[("d1", true), ("d2", true)]);
    let pod = node.until_health(&agent, "owner", "d1", "Healthy").await;
    assert_eq!(container(&pod, "main")["restartCount"], 0);
    assert_eq!(node.world.runtime.cri.count("start_container"), started, "health restarts nothing");
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pod_resources_api_lists_the_devices_of_active_pods() {
    // AC-04b-M15, AC-04b-M16
    if skips("the_pod_resources_api_lists_the_devices_of_active_pods") {
        return;
    }
    let (node, agent) = DeviceNode::joined(&[("d1", true), ("d2", true), ("d3", true)]).await;
    node.run("first", 1);
    node.world.until_ready(&agent, "first").await;
    node.run("second", 1);
    node.world.until_ready(&agent, "second").await;
    for (pod, device) in [("first", "d1"), ("second", "d2")] {
        node.assert_has_device(pod, device);
        let containers = node.world.pod_resources(pod).await;
        let listed: Vec<(&str, &str, &[String])> = containers
            .iter()
            .flat_map(|container| container.devices.iter().map(|found| (container.name.as_str(), found)))
            .map(|(name, found)| (name, found.resource_name.as_str(), found.device_ids.as_slice()))
            .collect();
        assert_eq!(listed, [("main", GPU, &[device.to_owned()][..])]);
    }
    node.world.api.delete("pods", NAMESPACE, "first", Some(1));
    node.world.until_gone(&agent, "first").await;
    assert!(node.world.pod_resources("first").await.is_empty(), "it is not active any more");
    assert_eq!(node.world.pod_resources("second").await.len(), 1);
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_requests_more_devices_than_are_free_is_rejected() {
    // AC-06c-5
    if skips("a_pod_that_requests_more_devices_than_are_free_is_rejected") {
        return;
    }
    let (node, agent) = DeviceNode::joined(&[("d1", true), ("d2", true), ("d3", true)]).await;
    node.run("first", 2);
    node.world.until_ready(&agent, "first").await;
    node.run("second", 2);
    let is_failed = |pod: &Value| pod["status"]["phase"] == "Failed";
    let pod = node.world.until_pod(&agent, "second", "is rejected", is_failed).await;
    let message = "Pod was rejected: Allocate failed due to requested number of devices unavailable for \
                   example.com/gpu. Requested: 2, Available: 1, which is unexpected";
    assert_eq!(pod["status"]["reason"], "UnexpectedAdmissionError");
    assert_eq!(pod["status"]["message"], message);
    assert_eq!(node.count(PluginMethod::Allocate), 1, "the plugin is not called for a pod that is rejected");
    // The free device is not reserved for the rejected pod.
    node.run("third", 1);
    node.world.until_ready(&agent, "third").await;
    node.assert_has_device("third", "d3");
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_restart_keeps_devices_and_status() {
    // AC-06c-10
    if skips("an_agent_restart_keeps_devices_and_status") {
        return;
    }
    let (mut node, agent) = DeviceNode::joined(&[("d1", true), ("d2", true)]).await;
    node.run("owner", 1);
    node.world.until_ready(&agent, "owner").await;
    node.until_health(&agent, "owner", "d1", "Healthy").await;
    a_moment().await;
    agent.kill().await;
    let (before, started) = (node.world.api.last(), node.world.runtime.cri.count("start_container"));
    let assert_unchanged = |node: &DeviceNode, when: &str| {
        let patches = node.world.agent_requests().since(before).at("pods", NAMESPACE, "owner").verb("patch");
        assert!(patches.is_empty(), "{when}: {patches}");
        assert_eq!(node.count(PluginMethod::Allocate), 1, "{when}");
        node.assert_has_device("owner", "d1");
    };
    let agent = node.world.home.start().await;
    // Pods that were there before the start are synced before a pod that comes after it.
    node.world.run(pod("later"));
    node.world.until_ready(&agent, "later").await;
    a_moment().await;
    assert_unchanged(&node, "before the plugin registers");
    node.register(&agent).await;
    node.until_capacity(&agent, 2, 2).await;
    a_moment().await;
    assert_unchanged(&node, "after the plugin has registered");
    assert_eq!(node.world.runtime.cri.count("start_container"), started + 1, "only the later pod is started");
    // The device of the first pod is not available to others.
    node.run("other", 1);
    node.world.until_ready(&agent, "other").await;
    node.assert_has_device("other", "d2");
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_reboot_a_pod_waits_for_its_device_plugin() {
    // AC-06c-11
    if skips("after_a_reboot_a_pod_waits_for_its_device_plugin") {
        return;
    }
    let (mut node, agent) = DeviceNode::joined(&[("d1", true), ("d2", true)]).await;
    // The pod that waits later gets the second device: a new allocation would choose the first one.
    node.run("passing", 1);
    node.world.until_ready(&agent, "passing").await;
    node.run("owner", 1);
    node.world.until_ready(&agent, "owner").await;
    node.assert_has_device("owner", "d2");
    node.world.api.delete("pods", NAMESPACE, "passing", Some(1));
    node.world.until_gone(&agent, "passing").await;
    let allocations = node.count(PluginMethod::Allocate);
    agent.kill().await;
    node.plugin.stop();
    node.world.runtime.cri.reboot();
    unmount_below(&node.world.home.root());

    let agent = node.world.home.start().await;
    let message = "waiting for device plugin example.com/gpu to register";
    let reason = json!({"reason": "WaitingForDevicePlugin", "message": message});
    let is_waiting = |pod: &Value| container(pod, "main")["state"]["waiting"] == reason;
    node.run("new", 1);
    for (name, phase) in [("owner", "Running"), ("new", "Pending")] {
        // The phase of a pod that has run does not return to Pending (spec 02b §3.2).
        let pod = node.world.until_pod(&agent, name, "waits for its device plugin", is_waiting).await;
        assert_eq!(pod["status"]["phase"], phase, "{name}");
    }
    node.world.until_event(&agent, "WaitingForDevicePlugin", message).await;
    node.world.run(pod("plain"));
    node.world.until_ready(&agent, "plain").await;
    for name in ["owner", "new"] {
        assert!(node.world.runtime.cri.running(name, "main").is_empty(), "the plugin of {name} has not registered");
    }

    node.register(&agent).await;
    for (name, device) in [("owner", "d2"), ("new", "d1")] {
        node.world.until_ready(&agent, name).await;
        node.assert_has_device(name, device);
        node.until_health(&agent, name, device, "Healthy").await;
    }
    assert_eq!(node.count(PluginMethod::Allocate), allocations + 1, "only the new pod needs a device");
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_plugin_that_hangs_delays_no_other_pod() {
    // Spec 06c §4
    if skips("a_device_plugin_that_hangs_delays_no_other_pod") {
        return;
    }
    let (node, agent) = DeviceNode::joined(&[("d1", true)]).await;
    node.plugin.fail(PluginMethod::Allocate, PluginFault::Hang);
    node.run("stuck", 1);
    node.plugin.wait_for_calls(PluginMethod::Allocate, 1).await;
    node.world.run(pod("plain"));
    node.world.until_ready(&agent, "plain").await;
    assert!(node.world.runtime.cri.running("stuck", "main").is_empty(), "its device is not allocated yet");
    node.plugin.heal();
    node.world.until_ready(&agent, "stuck").await;
    node.assert_has_device("stuck", "d1");
    drop(agent);
}

/// Its admission has not ended: it must not take the place of a pod that the node has room for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_whose_devices_are_being_allocated_occupies_nothing() {
    if skips("a_pod_whose_devices_are_being_allocated_occupies_nothing") {
        return;
    }
    let (node, agent) = DeviceNode::joined_with(json!({"maxPods": 1}), &[("d1", true)]).await;
    node.plugin.fail(PluginMethod::Allocate, PluginFault::Hang);
    node.run("stuck", 1);
    node.plugin.wait_for_calls(PluginMethod::Allocate, 1).await;
    node.world.run(pod("plain"));
    node.world.until_ready(&agent, "plain").await;
    drop(agent);
}
