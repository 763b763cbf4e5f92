//! Plugins that violate the contract: wrong sockets, lists, streams, and responses (spec 06c §1.3, §1.6, §4).

use std::{os::unix::fs::symlink, sync::Arc, time::Duration};

use prost::Message;
use serde_json::json;
use tokio::time::timeout;
use tonic::{Code, Status};

use berth_ports::{DeviceAdmission, PodDevices};
use berth_proto::device_plugin::{ContainerAllocateResponse, DeviceSpec, ListAndWatchResponse, Mount};
use berth_testkit::{
    device_plugin::{PluginMethod, SamplePlugin, default_response, healthy, numbered, on_node, unhealthy},
    plugin_server::PluginFault,
};

use super::fixture::{EVER, GPU, Node, container, count, no_options, pod, pod_of};

/// Resource of a second plugin.
const NIC: &str = "example.com/nic";
/// Admission error of a resource without healthy devices.
const NO_HEALTHY_DEVICES: &str = "no healthy devices present; cannot allocate unhealthy devices example.com/gpu";

fn health(list: &[(&str, &str)]) -> Vec<(String, String)> {
    list.iter().map(|(id, health)| ((*id).to_owned(), (*health).to_owned())).collect()
}

#[tokio::test]
async fn a_socket_path_that_is_no_socket_is_refused_with_its_path() {
    let node = Node::new();
    let mut plugin = node.plugin(GPU, no_options());
    plugin.set_devices(vec![healthy("d1")]);
    let agent = node.start().await;
    plugin.restart();
    let at = |name: &str| node.directory.path().join(name);
    std::fs::write(at("file.sock"), "").expect("written");
    symlink(&plugin.socket, at("link.sock")).expect("linked");
    std::fs::create_dir(at("directory.sock")).expect("created");
    for name in ["file.sock", "link.sock", "directory.sock"] {
        let refused = plugin.register_as(&agent.socket, "v1beta1", name, GPU).await.expect_err("refused");
        let text = format!("failed to dial device plugin: dial unix {}: not a socket", at(name).display());
        assert_eq!((refused.code(), refused.message()), (Code::Unknown, text.as_str()));
        assert!(agent.manager.capacity().borrow().is_empty(), "{name}");
    }
    agent.register(&mut plugin).await;
    agent.until_capacity(GPU, (1, 1)).await;
    agent.stop().await;
}

#[tokio::test]
async fn a_device_list_of_ten_megabytes_ends_only_its_stream() {
    let node = Node::new();
    let (mut plugin, agent) = node.start_with_devices(vec![healthy("d1"), healthy("d2")]).await;
    let long = |number: usize| healthy(&format!("{number}{}", "x".repeat(1 << 20)));
    plugin.set_devices((0..10).map(long).collect());
    agent.until_capacity(GPU, (2, 0)).await;
    assert_eq!(agent.admit(&pod("refused", 1), &[]).await, Err(NO_HEALTHY_DEVICES.to_owned()));
    plugin.set_devices(vec![healthy("d3")]);
    agent.register(&mut plugin).await;
    agent.until_capacity(GPU, (1, 1)).await;
    let owner = pod("owner", 1);
    agent.admit(&owner, &[]).await.expect("a device is free");
    assert_eq!(agent.ids(&owner, "c"), ["d3"]);
    agent.stop().await;
}

#[tokio::test]
async fn a_hundred_thousand_devices_below_the_message_limit_are_accepted() {
    let devices = numbered(100_000);
    assert!(ListAndWatchResponse { devices: devices.clone() }.encoded_len() < 4 << 20);
    let node = Node::new();
    let (plugin, agent) = node.start_with_devices(devices).await;
    let owner = pod("owner", 1);
    agent.admit(&owner, &[]).await.expect("devices are free");
    assert_eq!(agent.ids(&owner, "c"), ["dev0"]);
    assert_eq!(count(&plugin, PluginMethod::Allocate), 1);
    agent.stop().await;
}

#[tokio::test]
async fn duplicate_ids_are_one_device_and_empty_ids_none() {
    // AC-06c-3
    let node = Node::new();
    let mut plugin = node.plugin(GPU, no_options());
    plugin.set_devices(vec![healthy("d1"), healthy(""), unhealthy("d1"), healthy("d2"), healthy("d2"), unhealthy("")]);
    let agent = node.start().await;
    agent.register(&mut plugin).await;
    agent.until_capacity(GPU, (2, 1)).await;
    let devices = agent.manager.all_devices();
    let devices: Vec<(&str, bool)> = devices.iter().map(|device| (device.id.as_str(), device.is_healthy)).collect();
    assert_eq!(devices, [("d1", false), ("d2", true)], "the last entry of an ID counts");
    let text = "requested number of devices unavailable for example.com/gpu. Requested: 2, Available: 1";
    assert_eq!(agent.admit(&pod("two", 2), &[]).await, Err(text.to_owned()));
    agent.stop().await;
}

#[tokio::test]
async fn a_first_stream_that_fails_at_once_leaves_no_devices_until_the_next_registration() {
    // The first of upstream's scenarios "ListAndWatch fails immediately".
    let node = Node::new();
    let mut plugin = node.plugin(GPU, no_options());
    plugin.set_devices(vec![healthy("d1")]);
    plugin.fail(PluginMethod::ListAndWatch, PluginFault::Fail(Status::unavailable("broken")));
    let agent = node.start_waiting(Duration::ZERO).await;
    agent.register(&mut plugin).await;
    plugin.wait_for_calls(PluginMethod::ListAndWatch, 1).await;
    agent.until_capacity(GPU, (0, 0)).await;
    assert_eq!(agent.admit(&pod("refused", 1), &[]).await, Err(NO_HEALTHY_DEVICES.to_owned()));
    plugin.heal();
    agent.register(&mut plugin).await;
    agent.until_capacity(GPU, (1, 1)).await;
    agent.admit(&pod("owner", 1), &[]).await.expect("a device is free");
    agent.stop().await;
}

#[tokio::test]
async fn a_stream_that_ends_marks_devices_as_unhealthy_until_the_next_registration() {
    // AC-06c-4; upstream's scenarios "ListAndWatch fails after provisioning devices" and "fails immediately" again.
    let node = Node::new();
    let (mut plugin, agent) = node.start_with_devices(vec![healthy("d1"), healthy("d2")]).await;
    let owner = pod("owner", 1);
    agent.admit(&owner, &[]).await.expect("a device is free");
    plugin.end_streams();
    agent.until_capacity(GPU, (2, 0)).await;
    assert_eq!(agent.health(&owner), health(&[("d1", "Unhealthy")]));
    assert_eq!(agent.admit(&pod("refused", 1), &[&owner]).await, Err(NO_HEALTHY_DEVICES.to_owned()));
    agent.register(&mut plugin).await;
    agent.until_capacity(GPU, (2, 2)).await;

    plugin.fail(PluginMethod::ListAndWatch, PluginFault::Fail(Status::unavailable("broken")));
    agent.register(&mut plugin).await;
    agent.until_capacity(GPU, (2, 0)).await;
    plugin.heal();
    agent.register(&mut plugin).await;
    agent.until_capacity(GPU, (2, 2)).await;
    assert_eq!(agent.health(&owner), health(&[("d1", "Healthy")]));
    assert_eq!(agent.ids(&owner, "c"), ["d1"]);
    agent.stop().await;
}

#[tokio::test]
async fn a_registration_is_refused_if_get_device_plugin_options_fails() {
    let node = Node::new();
    let mut plugin = node.plugin(GPU, no_options());
    plugin.set_devices(vec![healthy("d1")]);
    let agent = node.start().await;
    plugin.restart();
    let broken = PluginFault::Fail(Status::internal("broken"));
    plugin.fail(PluginMethod::GetDevicePluginOptions, broken.clone());
    let refused = plugin.register(&agent.socket).await.expect_err("refused");
    let text = "failed to get device plugin options: rpc error: code = Internal desc = broken";
    assert_eq!((refused.code(), refused.message()), (Code::Unknown, text));
    assert!(agent.manager.capacity().borrow().is_empty());
    plugin.heal();
    agent.register(&mut plugin).await;
    agent.until_capacity(GPU, (1, 1)).await;

    // A refused registration does not replace the previous one.
    plugin.fail(PluginMethod::GetDevicePluginOptions, broken);
    plugin.register(&agent.socket).await.expect_err("refused");
    agent.admit(&pod("owner", 1), &[]).await.expect("the previous registration serves it");
    plugin.set_devices(vec![healthy("d1"), healthy("d2")]);
    agent.until_capacity(GPU, (2, 2)).await;
    agent.stop().await;
}

#[tokio::test]
async fn an_options_call_that_hangs_is_refused_at_its_deadline_and_delays_no_other_plugin() {
    let node = Node::new();
    let mut hung = node.plugin(NIC, no_options());
    let mut works = node.plugin(GPU, no_options());
    works.set_devices(vec![healthy("d1")]);
    hung.set_devices(vec![healthy("n1")]);
    hung.fail(PluginMethod::GetDevicePluginOptions, PluginFault::Hang);
    let agent = node.start().await;
    hung.restart();
    let meanwhile = async {
        hung.wait_for_calls(PluginMethod::GetDevicePluginOptions, 1).await;
        agent.register(&mut works).await;
        agent.until_capacity(GPU, (1, 1)).await;
        // Only now: a paused clock advances by itself while the sockets are idle.
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(11)).await;
        tokio::time::resume();
    };
    let (refused, ()) = tokio::join!(timeout(EVER, hung.register(&agent.socket)), meanwhile);
    let refused = refused.expect("the call has a deadline").expect_err("refused");
    let deadline = "rpc error: code = DeadlineExceeded desc = context deadline exceeded";
    assert_eq!(refused.message(), format!("failed to get device plugin options: {deadline}"));
    assert!(!agent.manager.capacity().borrow().contains_key(NIC));
    hung.heal();
    agent.register(&mut hung).await;
    agent.until_capacity(NIC, (1, 1)).await;
    agent.stop().await;
}

#[tokio::test]
async fn a_flood_of_device_lists_blocks_neither_the_agent_nor_other_plugins() {
    let node = Node::new();
    let mut flood = node.plugin(GPU, no_options());
    let mut other = node.plugin(NIC, no_options());
    flood.set_devices(vec![healthy("d1"), healthy("d2")]);
    other.set_devices(vec![healthy("n1")]);
    flood.change_behavior(|behavior| behavior.flood = 10_000);
    let agent = node.start().await;
    agent.register(&mut flood).await;
    agent.until_capacity(GPU, (2, 2)).await;
    agent.register(&mut other).await;
    agent.until_capacity(NIC, (1, 1)).await;
    let spec = json!({"containers": [container("c", &[(GPU, 1), (NIC, 1)])]});
    let owner = pod_of("owner", spec);
    agent.admit(&owner, &[]).await.expect("both plugins answer");
    assert_eq!(agent.ids(&owner, "c"), ["d1", "n1"]);
    // A new registration ends the flood.
    flood.change_behavior(|behavior| behavior.flood = 0);
    flood.set_devices(vec![healthy("d1")]);
    agent.register(&mut flood).await;
    agent.until_capacity(GPU, (1, 1)).await;
    assert!(agent.changed.lock().expect("whole").is_empty(), "equal lists change no health");
    agent.stop().await;
}

#[tokio::test]
async fn an_allocation_needs_one_container_response() {
    let node = Node::new();
    let (plugin, agent) = node.start_with_devices(vec![healthy("d1")]).await;
    let owner = pod("owner", 1);
    plugin.change_behavior(|behavior| behavior.container_responses = Some(0));
    let refused = agent.admit(&owner, &[]).await;
    assert_eq!(refused, Err("no containers return in allocation response ".to_owned()));
    assert!(agent.owners().is_empty());
    // Further responses are ignored.
    plugin.change_behavior(|behavior| behavior.container_responses = Some(2));
    agent.admit(&owner, &[]).await.expect("the first response counts");
    let options = agent.options(&owner, "c").await.expect("allocated");
    assert_eq!(options.envs, [("EXAMPLE_COM_GPU_DEVICES".to_owned(), "d1".to_owned())]);
    assert_eq!(options.devices.len(), 1);
    agent.stop().await;
}

fn with_env(name: &str, value: &str) -> ContainerAllocateResponse {
    ContainerAllocateResponse { envs: [(name.to_owned(), value.to_owned())].into(), ..Default::default() }
}

fn with_device(container_path: &str, host_path: &str) -> ContainerAllocateResponse {
    let device = DeviceSpec {
        container_path: container_path.to_owned(),
        host_path: host_path.to_owned(),
        permissions: "rw".to_owned(),
    };
    ContainerAllocateResponse { devices: vec![device], ..Default::default() }
}

fn with_mount(container_path: &str, host_path: &str) -> ContainerAllocateResponse {
    let mount = Mount { container_path: container_path.to_owned(), host_path: host_path.to_owned(), read_only: false };
    ContainerAllocateResponse { mounts: vec![mount], ..Default::default() }
}

#[tokio::test]
async fn an_invalid_allocate_response_is_refused_with_the_name_of_the_field() {
    let node = Node::new();
    let (plugin, agent) = node.start_with_devices(vec![healthy("d1")]).await;
    let owner = pod("owner", 1);
    let (name, path) = ("the name of an environment variable without '=' and NUL", "an absolute path without NUL");
    for (response, field, expected) in [
        (with_env("A", "x\0"), r#"envs["A"] "x\x00""#, "a text without NUL"),
        (with_env("A\0", "x"), r#"envs "A\x00""#, name),
        (with_env("", "x"), r#"envs """#, name),
        (with_device("/dev/a", "dev/null"), r#"devices[0].host_path "dev/null""#, path),
        (with_device("/dev/a\0", "/dev/null"), r#"devices[0].container_path "/dev/a\x00""#, path),
        (with_mount("/a", "../etc"), r#"mounts[0].host_path "../etc""#, path),
        (with_mount("/a", "/b\0c"), r#"mounts[0].host_path "/b\x00c""#, path),
        (with_mount("", "/b"), r#"mounts[0].container_path """#, path),
    ] {
        plugin.change_behavior(|behavior| behavior.allocate = Arc::new(move |_: &[String]| response.clone()));
        let refused = agent.admit(&owner, &[]).await;
        assert_eq!(refused, Err(format!("invalid {field} in allocation response: expected {expected}")));
        assert!(agent.owners().is_empty(), "{field}");
    }
    plugin.change_behavior(|behavior| behavior.allocate = Arc::new(|ids: &[String]| default_response(GPU, ids)));
    agent.admit(&owner, &[]).await.expect("the device is free");
    agent.stop().await;
}

#[tokio::test]
async fn of_two_plugins_for_a_resource_the_newest_counts() {
    let node = Node::new();
    let (mut old, agent) = node.start_with_devices(vec![healthy("d1")]).await;
    let new = SamplePlugin::start(node.directory.path(), "new.sock", GPU, no_options());
    new.set_devices(vec![healthy("n1"), healthy("n2")]);
    new.register(&agent.socket).await.expect("registered");
    agent.until_capacity(GPU, (2, 2)).await;
    old.set_devices(vec![healthy("d1"), healthy("d2"), healthy("d3")]);
    old.end_streams();
    old.stop();
    // Round trips to the new plugin: the agent has seen the end of the old one by then, if it still followed it.
    let owner = pod("owner", 1);
    agent.admit(&owner, &[]).await.expect("the new plugin serves it");
    assert_eq!(agent.ids(&owner, "c"), ["n1"]);
    new.set_devices(vec![healthy("n1"), healthy("n2"), unhealthy("n3")]);
    agent.until_capacity(GPU, (3, 2)).await;
    assert_eq!(agent.health(&owner), health(&[("n1", "Healthy")]));
    assert_eq!((count(&old, PluginMethod::Allocate), count(&new, PluginMethod::Allocate)), (0, 1));
    agent.stop().await;
}

#[tokio::test]
async fn a_device_that_is_unhealthy_for_a_while_stays_with_its_pod() {
    // AC-06c-3; upstream's scenario "device goes unhealthy and healthy again".
    let node = Node::new();
    let (plugin, agent) = node.start_with_devices(vec![healthy("d1")]).await;
    let owner = pod("owner", 1);
    agent.admit(&owner, &[]).await.expect("a device is free");
    assert_eq!(agent.health(&owner), health(&[("d1", "Healthy")]));
    plugin.set_devices(vec![unhealthy("d1")]);
    agent.until_capacity(GPU, (1, 0)).await;
    assert_eq!(agent.health(&owner), health(&[("d1", "Unhealthy")]));
    for refused in [&pod("other", 1), &owner] {
        let text = Err(NO_HEALTHY_DEVICES.to_owned());
        assert_eq!(agent.admit(refused, &[&owner]).await, text, "{}", refused.name());
        assert_eq!(agent.ids(&owner, "c"), ["d1"]);
    }
    plugin.set_devices(vec![healthy("d1")]);
    agent.until_capacity(GPU, (1, 1)).await;
    assert_eq!(agent.health(&owner), health(&[("d1", "Healthy")]));
    agent.admit(&owner, &[&owner]).await.expect("it keeps its device");
    assert_eq!(count(&plugin, PluginMethod::Allocate), 1);
    let changed = agent.changed.lock().expect("whole").clone();
    assert_eq!(changed, [owner.uid().clone(), owner.uid().clone()], "one report per change");
    agent.stop().await;
}

#[tokio::test]
async fn a_pod_keeps_its_devices_while_their_plugin_is_stopped() {
    // AC-06c-4
    let node = Node::new();
    let (mut plugin, agent) = node.start_with_devices(vec![healthy("d1"), healthy("d2")]).await;
    let owner = pod("owner", 1);
    agent.admit(&owner, &[]).await.expect("a device is free");
    let options = agent.options(&owner, "c").await.expect("allocated");
    plugin.stop();
    agent.until_capacity(GPU, (2, 0)).await;
    assert_eq!(agent.health(&owner), health(&[("d1", "Unhealthy")]));
    assert_eq!(agent.ids(&owner, "c"), ["d1"]);
    let running = agent.devices.admit(&owner, true, &|| None);
    assert_eq!(running, DeviceAdmission::Allocated, "its containers run");
    assert_eq!(agent.options(&owner, "c").await, Ok(options), "a container of it may restart");
    agent.register(&mut plugin).await;
    agent.until_capacity(GPU, (2, 2)).await;
    let other = pod("other", 1);
    agent.admit(&other, &[&owner]).await.expect("the second device is free");
    assert_eq!(agent.ids(&other, "c"), ["d2"]);
    agent.stop().await;
}

#[tokio::test]
async fn a_device_that_vanishes_during_allocate_is_assigned_without_topology() {
    for (vanishes, by_node) in [(false, r#""DeviceIDs":{"1":["d1"]}"#), (true, r#""DeviceIDs":{"-1":["d1"]}"#)] {
        let node = Node::new();
        let (plugin, agent) = node.start_with_devices(vec![on_node("d1", 1), on_node("d2", 1)]).await;
        plugin.fail(PluginMethod::Allocate, PluginFault::Hang);
        let owner = pod("owner", 1);
        assert_eq!(agent.devices.admit(&owner, false, &|| None), DeviceAdmission::Pending(None));
        plugin.wait_for_calls(PluginMethod::Allocate, 1).await;
        if vanishes {
            plugin.set_devices(vec![on_node("d2", 1)]);
            agent.until_capacity(GPU, (1, 1)).await;
        }
        plugin.heal();
        agent.admit(&owner, &[&owner]).await.expect("the plugin has allocated it");
        assert_eq!(agent.ids(&owner, "c"), ["d1"]);
        let status = if vanishes { "Unhealthy" } else { "Healthy" };
        assert_eq!(agent.health(&owner), health(&[("d1", status)]));
        let checkpoint = std::fs::read_to_string(node.checkpoint()).expect("written");
        assert!(checkpoint.contains(by_node), "{checkpoint}");
        agent.stop().await;
    }
}
