//! Device plugins that do not answer, or fail, at a call: deadlines, errors, released devices.
//!
//! Spec 06c §1.1, §1.6, §1.7.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use serde_json::json;
use tonic::Status;

use berth_ports::{DeviceAdmission, PodDevices};
use berth_proto::device_plugin::{Device, DevicePluginOptions};
use berth_testkit::{
    device_plugin::{PluginMethod, SamplePlugin, healthy},
    plugin_server::PluginFault,
};
use berth_types::Pod;

use super::fixture::{Agent, EVER, GPU, Node, container, count, no_options, pass, pod, pod_of, series};

/// Resource of a second plugin.
const NIC: &str = "example.com/nic";
/// Error of a call that reached its deadline.
const DEADLINE: &str = "rpc error: code = DeadlineExceeded desc = context deadline exceeded";

fn seconds(number: u64) -> Duration {
    Duration::from_secs(number)
}

/// Admits a pod once the checkpoint can be written: a write that was in progress when the clock jumped has missed its
/// deadline, and blocks the next one until it ends.
async fn admit_after_pass(agent: &Agent, pod: &Arc<Pod>) {
    let admitted = async {
        while let Err(error) = agent.admit(pod, &[]).await {
            assert!(error.starts_with("failed to write checkpoint file: "), "{error}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(EVER, admitted).await.expect("a device is free");
}

/// A plugin with these options and devices, registered with an agent.
async fn start(options: DevicePluginOptions, devices: &[&str]) -> (Node, SamplePlugin, Agent) {
    let node = Node::new();
    let mut plugin = node.plugin(GPU, options);
    plugin.set_devices(devices.iter().map(|id| healthy(id)).collect::<Vec<Device>>());
    let agent = node.start().await;
    agent.register(&mut plugin).await;
    let number = u64::try_from(devices.len()).expect("a small number");
    agent.until_capacity(GPU, (number, number)).await;
    (node, plugin, agent)
}

#[tokio::test]
async fn an_allocate_call_that_hangs_ends_after_60_seconds_and_releases_its_devices() {
    // Spec 06c §4
    let (_node, plugin, agent) = start(no_options(), &["d1"]).await;
    plugin.fail(PluginMethod::Allocate, PluginFault::Hang);
    let owner = pod("owner", 1);
    assert_eq!(agent.devices.admit(&owner, false, &|| None), DeviceAdmission::Pending(None));
    plugin.wait_for_calls(PluginMethod::Allocate, 1).await;
    pass(seconds(58)).await;
    assert_eq!(agent.devices.admit(&owner, false, &|| None), DeviceAdmission::Pending(None));
    pass(seconds(3)).await;
    assert_eq!(agent.admit(&owner, &[]).await, Err(DEADLINE.to_owned()));
    assert!(agent.owners().is_empty());
    plugin.heal();
    admit_after_pass(&agent, &owner).await;
    assert_eq!(agent.ids(&owner, "c"), ["d1"]);
    agent.stop().await;
}

#[tokio::test]
async fn a_preference_that_cannot_be_read_refuses_the_pod() {
    let options = DevicePluginOptions { get_preferred_allocation_available: true, ..no_options() };
    let (_node, plugin, agent) = start(options, &["d1", "d2"]).await;
    let (owner, method) = (pod("owner", 1), PluginMethod::GetPreferredAllocation);
    let error = |cause: &str| Err(format!("device plugin GetPreferredAllocation rpc failed with err: {cause}"));
    plugin.fail(method, PluginFault::Fail(Status::internal("broken")));
    assert_eq!(agent.admit(&owner, &[]).await, error("rpc error: code = Internal desc = broken"));
    plugin.fail(method, PluginFault::Hang);
    let meanwhile = async {
        plugin.wait_for_calls(method, 2).await;
        pass(seconds(31)).await;
    };
    let (refused, ()) = tokio::join!(agent.admit(&owner, &[]), meanwhile);
    assert_eq!(refused, error(DEADLINE));
    assert_eq!((agent.owners().len(), count(&plugin, PluginMethod::Allocate)), (0, 0));

    // A preference for devices that are not available is none.
    plugin.heal();
    plugin.change_behavior(|behavior| behavior.preferred = Some(["x", "d9", ""].map(str::to_owned).to_vec()));
    admit_after_pass(&agent, &owner).await;
    assert_eq!(agent.ids(&owner, "c"), ["d1"]);
    agent.stop().await;
}

#[tokio::test]
async fn a_container_whose_pre_start_call_hangs_is_not_created() {
    // AC-06c-8, spec 06c §1.7
    let options = DevicePluginOptions { pre_start_required: true, ..no_options() };
    let (_node, plugin, agent) = start(options, &["d1"]).await;
    let (owner, method) = (pod("owner", 1), PluginMethod::PreStartContainer);
    agent.admit(&owner, &[]).await.expect("a device is free");
    plugin.fail(method, PluginFault::Hang);
    let meanwhile = async {
        plugin.wait_for_calls(method, 1).await;
        pass(seconds(31)).await;
    };
    let (failed, ()) = tokio::join!(agent.options(&owner, "c"), meanwhile);
    assert_eq!(failed, Err(format!("device plugin PreStartContainer rpc failed with err: {DEADLINE}")));
    assert_eq!(agent.ids(&owner, "c"), ["d1"], "the next attempt has the same device");
    plugin.heal();
    agent.options(&owner, "c").await.expect("prepared");
    assert_eq!(count(&plugin, PluginMethod::Allocate), 1);
    agent.stop().await;
}

#[tokio::test]
async fn a_plugin_that_sends_no_device_list_delays_only_its_own_pods() {
    let node = Node::new();
    let (mut hung, mut works) = (node.plugin(NIC, no_options()), node.plugin(GPU, no_options()));
    hung.set_devices(vec![healthy("n1")]);
    works.set_devices(vec![healthy("d1")]);
    hung.fail(PluginMethod::ListAndWatch, PluginFault::Hang);
    let agent = node.start().await;
    agent.register(&mut hung).await;
    agent.register(&mut works).await;
    hung.wait_for_calls(PluginMethod::ListAndWatch, 1).await;
    agent.until_capacity(GPU, (1, 1)).await;
    agent.until_capacity(NIC, (0, 0)).await;
    let stuck = pod_of("stuck", json!({"containers": [container("c", &[(NIC, 1)])]}));
    let waiting = DeviceAdmission::Pending(Some(NIC.to_owned()));
    assert_eq!(agent.devices.admit(&stuck, false, &|| None), waiting);
    agent.admit(&pod("quick", 1), &[]).await.expect("another plugin serves it");
    assert_eq!(agent.devices.admit(&stuck, false, &|| None), waiting);
    // The wait is bounded, and the plugin may recover.
    pass(EVER).await;
    let text = "no healthy devices present; cannot allocate unhealthy devices example.com/nic";
    assert_eq!(agent.admit(&stuck, &[]).await, Err(text.to_owned()));
    hung.heal();
    agent.until_capacity(NIC, (1, 1)).await;
    agent.admit(&stuck, &[]).await.expect("a device is free");
    agent.stop().await;
}

#[tokio::test]
async fn registrations_and_calls_are_counted_by_resource() {
    // Spec 06c §1.3, 08 §4.10
    let (_node, plugin, agent) = start(no_options(), &["d1", "d2"]).await;
    agent.admit(&pod("first", 1), &[]).await.expect("a device is free");
    plugin.fail(PluginMethod::Allocate, PluginFault::Fail(Status::internal("broken")));
    assert!(agent.admit(&pod("second", 1), &[]).await.is_err());
    plugin.heal();
    plugin.fail(PluginMethod::GetDevicePluginOptions, PluginFault::Fail(Status::internal("broken")));
    plugin.register(&agent.socket).await.expect_err("refused");
    // An invalid name is no value of a label.
    plugin.register_as(&agent.socket, "v1beta1", "x.sock", "invalid").await.expect_err("refused");
    for (family, value) in
        [("kubelet_device_plugin_registration_total", 2.0), ("kubelet_device_plugin_alloc_duration_seconds", 2.0)]
    {
        let expected = BTreeMap::from([(vec![GPU.to_owned()], value)]);
        assert_eq!(series(&agent.registry, family), expected, "{family}");
    }
    agent.stop().await;
}
