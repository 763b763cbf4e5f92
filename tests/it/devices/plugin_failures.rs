//! Upstream's conformance scenarios "Device Plugin Failures", restated (spec 06c §1.3, §1.4).
//!
//! | Scenario | Test |
//! |---|---|
//! | `GetDevicePluginOptions` fails | [`a_plugin_whose_options_call_fails_is_not_used`] |
//! | a single device is unhealthy and healthy again | [`allocatable_is_the_number_of_healthy_devices`] |
//! | several devices are unhealthy and healthy again | the same |
//! | a device of a running pod is unhealthy | [`an_unhealthy_device_of_a_deleted_pod_stays_unhealthy`] |
//! | `ListAndWatch` fails at once | [`a_stream_that_fails_at_once_is_not_opened_again`] |
//! | `ListAndWatch` fails after provisioning devices | [`a_stream_that_ends_is_not_opened_again`] |
//! | the plugin is stopped | [`a_stopped_plugin_has_no_devices_after_its_grace_period`] |

use std::time::Duration;

use tonic::Status;

use berth_ports::PodDevices;
use berth_testkit::{
    device_plugin::{PluginCall, PluginMethod, SamplePlugin, healthy, unhealthy},
    plugin_server::PluginFault,
};

use super::fixture::{Agent, GPU, Node, no_options, pass, pod};

/// Resource of a second plugin.
const NIC: &str = "example.com/nic";
/// Calls of a plugin that registers once.
const REGISTERED_ONCE: [PluginCall; 2] = [PluginCall::GetDevicePluginOptions, PluginCall::ListAndWatch];

fn minutes(number: u64) -> Duration {
    Duration::from_secs(60 * number)
}

/// Capacity and allocatable of [`GPU`]; `None` if the resource is not known.
fn capacity(agent: &Agent) -> Option<(u64, u64)> {
    agent.manager.capacity().borrow().get(GPU).map(|found| (found.capacity, found.allocatable))
}

/// Registers a second plugin: a call that the agent owed the first one would have arrived by then.
async fn register_other(node: &Node, agent: &Agent) -> SamplePlugin {
    let mut other = node.plugin(NIC, no_options());
    other.set_devices(vec![healthy("n1")]);
    agent.register(&mut other).await;
    agent.until_capacity(NIC, (1, 1)).await;
    other
}

#[tokio::test]
async fn a_plugin_whose_options_call_fails_is_not_used() {
    let node = Node::new();
    let mut plugin = node.plugin(GPU, no_options());
    plugin.set_devices(vec![healthy("d1")]);
    plugin.fail(PluginMethod::GetDevicePluginOptions, PluginFault::Fail(Status::unknown("no options")));
    let agent = node.start().await;
    plugin.restart();
    let refused = plugin.register(&agent.socket).await.expect_err("refused");
    let text = "failed to get device plugin options: rpc error: code = Unknown desc = no options";
    assert_eq!(refused.message(), text);
    let _other = register_other(&node, &agent).await;
    assert_eq!(plugin.calls(), [PluginCall::GetDevicePluginOptions]);
    assert_eq!(capacity(&agent), None);
    agent.stop().await;
}

#[tokio::test]
async fn allocatable_is_the_number_of_healthy_devices() {
    // AC-06c-3
    let steps: [(usize, &[&[usize]]); 2] = [(1, &[&[0], &[]]), (4, &[&[3], &[], &[1, 3], &[1], &[]])];
    for (number, steps) in steps {
        let ids: Vec<String> = (0..number).map(|index| index.to_string()).collect();
        let node = Node::new();
        let (plugin, agent) = node.start_with_devices(ids.iter().map(|id| healthy(id)).collect()).await;
        for bad in steps {
            let device = |(index, id): (usize, &String)| if bad.contains(&index) { unhealthy(id) } else { healthy(id) };
            plugin.set_devices(ids.iter().enumerate().map(device).collect());
            let count = |number: usize| u64::try_from(number).expect("a small number");
            agent.until_capacity(GPU, (count(number), count(number - bad.len()))).await;
        }
        agent.stop().await;
    }
}

#[tokio::test]
async fn an_unhealthy_device_of_a_deleted_pod_stays_unhealthy() {
    // AC-06c-3
    let node = Node::new();
    let (plugin, agent) = node.start_with_devices(vec![healthy("d1")]).await;
    let owner = pod("owner", 1);
    agent.admit(&owner, &[]).await.expect("a device is free");
    assert_eq!(capacity(&agent), Some((1, 1)), "an assigned device still counts");
    plugin.set_devices(vec![unhealthy("d1")]);
    agent.until_capacity(GPU, (1, 0)).await;
    assert_eq!(agent.ids(&owner, "c"), ["d1"], "its pod keeps it");
    agent.devices.release(owner.uid());
    let text = "no healthy devices present; cannot allocate unhealthy devices example.com/gpu";
    assert_eq!(agent.admit(&pod("other", 1), &[]).await, Err(text.to_owned()));
    assert_eq!(capacity(&agent), Some((1, 0)));
    agent.stop().await;
}

#[tokio::test]
async fn a_stream_that_fails_at_once_is_not_opened_again() {
    // AC-06c-4
    let node = Node::new();
    let mut plugin = node.plugin(GPU, no_options());
    plugin.set_devices(vec![healthy("d1")]);
    plugin.fail(PluginMethod::ListAndWatch, PluginFault::Fail(Status::unknown("no list")));
    let agent = node.start().await;
    agent.register(&mut plugin).await;
    plugin.wait_for_calls(PluginMethod::ListAndWatch, 1).await;
    agent.until_capacity(GPU, (0, 0)).await;
    // The plugin would answer a second call.
    plugin.heal();
    pass(minutes(10)).await;
    let _other = register_other(&node, &agent).await;
    assert_eq!(plugin.calls(), REGISTERED_ONCE);
    assert_eq!(capacity(&agent), Some((0, 0)), "the resource stays known");
    agent.stop().await;
}

#[tokio::test]
async fn a_stream_that_ends_is_not_opened_again() {
    // AC-06c-4
    let node = Node::new();
    let (plugin, agent) = node.start_with_devices(vec![healthy("d1"), healthy("d2")]).await;
    plugin.end_streams();
    agent.until_capacity(GPU, (2, 0)).await;
    pass(minutes(4)).await;
    let _other = register_other(&node, &agent).await;
    assert_eq!(plugin.calls(), REGISTERED_ONCE);
    assert_eq!(capacity(&agent), Some((2, 0)), "capacity stays for 5 minutes");
    pass(minutes(2)).await;
    agent.until_capacity(GPU, (0, 0)).await;
    assert_eq!(plugin.calls(), REGISTERED_ONCE);
    agent.stop().await;
}

#[tokio::test]
async fn a_stopped_plugin_has_no_devices_after_its_grace_period() {
    // AC-06c-4
    let node = Node::new();
    let (mut plugin, agent) = node.start_with_devices(vec![healthy("d1"), healthy("d2")]).await;
    plugin.stop();
    agent.until_capacity(GPU, (2, 0)).await;
    pass(minutes(6)).await;
    agent.until_capacity(GPU, (0, 0)).await;
    agent.register(&mut plugin).await;
    agent.until_capacity(GPU, (2, 2)).await;
    agent.stop().await;
}
