//! Device and DRA managers with plugins on real sockets: registration, allocation, restart, health (spec 06c).

mod bad_plugins;
mod checkpoint;
mod claim_calls;
mod claim_crash;
mod claim_fixture;
mod crash;
mod deadlines;
mod figures;
mod fixture;
mod numa_alignment;
mod plugin_failures;

use std::{collections::BTreeMap, time::Duration};

use serde_json::json;

use berth_ports::{DeviceAdmission, PluginHandler, PluginInfo, PodDevices};
use berth_proto::device_plugin::DevicePluginOptions;
use berth_resources::devices::PluginRegistry;
use berth_testkit::{
    device_plugin::{PluginMethod, healthy, on_node, unhealthy},
    plugin_server::PluginFault,
};
use fixture::{GPU, Node, container, count, no_options, pod, pod_of};

#[tokio::test]
async fn a_restart_keeps_devices_without_another_allocation() {
    // AC-06c-6, AC-06c-10
    let node = Node::new();
    let mut plugin = node.plugin(GPU, no_options());
    plugin.set_devices(vec![healthy("d1"), healthy("d2")]);
    let agent = node.start().await;
    agent.register(&mut plugin).await;
    agent.until_capacity(GPU, (2, 2)).await;
    let owner = pod("owner", 1);
    agent.admit(&owner, &[]).await.expect("a device is free");
    let options = agent.options(&owner, "c").await.expect("allocated");
    assert_eq!(options.envs, [("EXAMPLE_COM_GPU_DEVICES".to_owned(), "d1".to_owned())]);
    let paths: Vec<_> = options.devices.iter().map(|d| (d.container_path.as_str(), d.host_path.as_str())).collect();
    assert_eq!(paths, [("/dev/d1", "/dev/null")]);
    agent.stop().await;

    let agent = node.start().await;
    agent.register(&mut plugin).await;
    agent.until_capacity(GPU, (2, 2)).await;
    agent.admit(&owner, &[]).await.expect("it keeps its device");
    assert_eq!(agent.options(&owner, "c").await.expect("restored"), options);
    assert_eq!(count(&plugin, PluginMethod::Allocate), 1);
    agent.stop().await;
}

#[tokio::test]
async fn devices_of_others_are_not_available() {
    // AC-06c-5
    let node = Node::new();
    let mut plugin = node.plugin(GPU, no_options());
    plugin.set_devices(vec![healthy("d1"), healthy("d2"), healthy("d3"), unhealthy("d4")]);
    let agent = node.start().await;
    agent.register(&mut plugin).await;
    agent.until_capacity(GPU, (4, 3)).await;
    let (first, second) = (pod("first", 2), pod("second", 2));
    agent.admit(&first, &[]).await.expect("two devices are free");
    let refused = agent.admit(&second, &[&first]).await;
    let text = "requested number of devices unavailable for example.com/gpu. Requested: 2, Available: 1";
    assert_eq!(refused, Err(text.to_owned()));
    assert_eq!(agent.ids(&second, "c"), [] as [String; 0]);
    agent.admit(&second, &[]).await.expect("the first pod is not active any more");
    assert_eq!(agent.ids(&first, "c"), [] as [String; 0]);
    agent.stop().await;
}

#[tokio::test]
async fn init_containers_leave_their_devices_to_regular_ones() {
    // AC-06c-9
    let node = Node::new();
    let mut plugin = node.plugin(GPU, no_options());
    plugin.set_devices(vec![healthy("d1"), healthy("d2")]);
    let agent = node.start().await;
    agent.register(&mut plugin).await;
    agent.until_capacity(GPU, (2, 2)).await;
    let spec = json!({
        "initContainers": [container("setup", &[(GPU, 1)])],
        "containers": [container("c", &[(GPU, 1)])],
    });
    let owner = pod_of("owner", spec);
    agent.admit(&owner, &[]).await.expect("a device is free");
    assert_eq!((agent.ids(&owner, "setup"), agent.ids(&owner, "c")), (vec!["d1".to_owned()], vec!["d1".to_owned()]));
    assert_eq!(agent.devices.allocatable(owner.uid()), BTreeMap::from([(GPU.to_owned(), 2)]));
    agent.stop().await;
}

#[tokio::test]
async fn the_preference_of_the_plugin_counts() {
    // AC-06c-8
    let node = Node::new();
    let options = DevicePluginOptions { get_preferred_allocation_available: true, pre_start_required: true };
    let mut plugin = node.plugin(GPU, options);
    plugin.set_devices(vec![healthy("d1"), healthy("d2"), healthy("d3")]);
    plugin.change_behavior(|behavior| behavior.preferred = Some(vec!["d3".to_owned()]));
    let agent = node.start().await;
    agent.register(&mut plugin).await;
    agent.until_capacity(GPU, (3, 3)).await;
    let owner = pod("owner", 1);
    agent.admit(&owner, &[]).await.expect("devices are free");
    assert_eq!(agent.ids(&owner, "c"), ["d3"]);
    agent.options(&owner, "c").await.expect("prepared");
    plugin.wait_for_calls(PluginMethod::PreStartContainer, 1).await;
    plugin.fail(PluginMethod::PreStartContainer, PluginFault::Fail(tonic::Status::internal("broken")));
    let failed = agent.options(&owner, "c").await;
    let text = "device plugin PreStartContainer rpc failed with err: rpc error: code = Internal desc = broken";
    assert_eq!(failed, Err(text.to_owned()));
    agent.stop().await;
}

#[tokio::test]
async fn a_pod_waits_for_a_plugin_that_the_checkpoint_names() {
    // AC-06c-11
    let node = Node::new();
    let mut plugin = node.plugin(GPU, no_options());
    plugin.set_devices(vec![healthy("d1"), on_node("d2", 0)]);
    let agent = node.start().await;
    agent.register(&mut plugin).await;
    agent.until_capacity(GPU, (2, 2)).await;
    let (owner, other) = (pod("owner", 1), pod("other", 1));
    agent.admit(&owner, &[]).await.expect("a device is free");
    agent.stop().await;
    plugin.stop();

    // A reboot: the plugin registers after its pod was admitted again.
    let agent = node.start().await;
    let none = || None;
    for waiting in [&owner, &other] {
        let admission = agent.devices.admit(waiting, false, &none);
        assert_eq!(admission, DeviceAdmission::Pending(Some(GPU.to_owned())), "{}", waiting.name());
    }
    plugin.restart();
    agent.register(&mut plugin).await;
    for waiting in [&owner, &other] {
        agent.admit(waiting, &[&owner, &other]).await.expect("the plugin is back");
    }
    assert_eq!((agent.ids(&owner, "c"), agent.ids(&other, "c")), (vec!["d1".to_owned()], vec!["d2".to_owned()]));
    agent.stop().await;
    plugin.stop();

    // The plugin does not return in time.
    let agent = node.start_waiting(Duration::ZERO).await;
    let text = "no healthy devices present; cannot allocate unhealthy devices example.com/gpu";
    assert_eq!(agent.admit(&owner, &[&owner]).await, Err(text.to_owned()));
    agent.stop().await;
}

#[tokio::test]
async fn health_follows_the_plugin_until_it_is_gone() {
    // AC-06c-3, AC-06c-4
    let node = Node::new();
    let mut plugin = node.plugin(GPU, no_options());
    plugin.set_devices(vec![healthy("d1"), healthy("d2")]);
    let agent = node.start().await;
    agent.register(&mut plugin).await;
    agent.until_capacity(GPU, (2, 2)).await;
    let owner = pod("owner", 2);
    agent.admit(&owner, &[]).await.expect("devices are free");
    let states = |first: &str, second: &str| vec![("d1".into(), first.into()), ("d2".into(), second.into())];
    assert_eq!(agent.health(&owner), states("Healthy", "Healthy"));
    plugin.set_devices(vec![healthy("d1"), unhealthy("d2")]);
    agent.until_capacity(GPU, (2, 1)).await;
    assert_eq!(agent.health(&owner), states("Healthy", "Unhealthy"));
    plugin.set_devices(vec![healthy("d2")]);
    agent.until_capacity(GPU, (1, 1)).await;
    assert_eq!(agent.health(&owner), states("Unhealthy", "Healthy"), "a device that is gone is not healthy");
    plugin.set_devices(vec![healthy("d1"), healthy("d2")]);
    agent.until_capacity(GPU, (2, 2)).await;
    plugin.stop();
    agent.until_capacity(GPU, (2, 0)).await;
    assert_eq!(agent.health(&owner), states("Unhealthy", "Unhealthy"));
    agent.until("all changes are reported", |agent| agent.changed.lock().expect("whole").len() >= 4).await;
    assert!(agent.changed.lock().expect("whole").iter().all(|uid| uid == owner.uid()));
    plugin.restart();
    agent.register(&mut plugin).await;
    agent.until_capacity(GPU, (2, 2)).await;
    agent.stop().await;
}

#[tokio::test]
async fn a_plugin_that_hangs_delays_only_its_own_pods() {
    let node = Node::new();
    let mut hung = node.plugin("example.com/hung", no_options());
    let mut works = node.plugin(GPU, no_options());
    hung.set_devices(vec![healthy("h1")]);
    works.set_devices(vec![healthy("d1")]);
    hung.fail(PluginMethod::Allocate, PluginFault::Hang);
    let agent = node.start().await;
    agent.register(&mut hung).await;
    agent.register(&mut works).await;
    agent.until_capacity("example.com/hung", (1, 1)).await;
    agent.until_capacity(GPU, (1, 1)).await;
    let stuck = pod_of("stuck", json!({"containers": [container("c", &[("example.com/hung", 1)])]}));
    let none = || None;
    assert_eq!(agent.devices.admit(&stuck, false, &none), DeviceAdmission::Pending(None));
    hung.wait_for_calls(PluginMethod::Allocate, 1).await;
    agent.admit(&pod("quick", 1), &[]).await.expect("another plugin serves it");
    assert_eq!(agent.devices.admit(&stuck, false, &none), DeviceAdmission::Pending(None));
    // The reserved device is free again once the pod is released.
    agent.devices.release(stuck.uid());
    hung.heal();
    let next = pod_of("next", json!({"containers": [container("c", &[("example.com/hung", 1)])]}));
    agent.admit(&next, &[]).await.expect("the device was released");
    agent.stop().await;
}

#[tokio::test]
async fn an_allocation_that_fails_leaves_nothing_behind() {
    let node = Node::new();
    let mut plugin = node.plugin(GPU, no_options());
    plugin.set_devices(vec![healthy("d1")]);
    plugin.fail(PluginMethod::Allocate, PluginFault::Fail(tonic::Status::unknown("no luck")));
    let agent = node.start().await;
    agent.register(&mut plugin).await;
    agent.until_capacity(GPU, (1, 1)).await;
    let owner = pod("owner", 1);
    let refused = agent.admit(&owner, &[]).await;
    assert_eq!(refused, Err("rpc error: code = Unknown desc = no luck".to_owned()));
    assert!(agent.devices.allocatable(owner.uid()).is_empty());
    plugin.heal();
    agent.admit(&owner, &[]).await.expect("the device is free");
    agent.stop().await;
}

#[tokio::test]
async fn invalid_registrations_are_refused_with_the_reason() {
    // AC-06c-1, AC-06c-2
    let node = Node::new();
    let plugin = node.plugin(GPU, no_options());
    let agent = node.start().await;
    for (version, endpoint, resource, text) in [
        (
            "v1alpha",
            "example.com-gpu.sock",
            GPU,
            "requested API version \"v1alpha\" is not supported by kubelet. Supported version is [\"v1beta1\"]",
        ),
        ("v1beta1", "example.com-gpu.sock", "foo", "the ResourceName \"foo\" is invalid"),
        ("v1beta1", "example.com-gpu.sock", "kubernetes.io/foo", "the ResourceName \"kubernetes.io/foo\" is invalid"),
    ] {
        let refused = plugin.register_as(&agent.socket, version, endpoint, resource).await.expect_err("refused");
        assert_eq!((refused.code(), refused.message()), (tonic::Code::Unknown, text));
    }
    for endpoint in ["../x.sock", "", ".", "a/b"] {
        let refused = plugin.register_as(&agent.socket, "v1beta1", endpoint, GPU).await.expect_err("refused");
        assert!(refused.message().starts_with("invalid endpoint"), "{}", refused.message());
    }
    agent.stop().await;
}

#[tokio::test]
async fn plugins_register_through_the_plugin_watcher_too() {
    let node = Node::new();
    let mut plugin = node.plugin(GPU, no_options());
    plugin.set_devices(vec![healthy("d1")]);
    let agent = node.start().await;
    plugin.restart();
    let handler = PluginRegistry(agent.manager.clone());
    let info = |versions: &[&str]| PluginInfo {
        kind: "DevicePlugin".to_owned(),
        name: GPU.to_owned(),
        endpoint: plugin.socket.clone(),
        versions: versions.iter().map(|version| (*version).to_owned()).collect(),
        socket: plugin.socket.clone(),
    };
    let wrong = "manager version, v1beta1, is not among plugin supported versions [v1alpha1]";
    assert_eq!(handler.validate(&info(&["v1alpha1"])), Err(wrong.to_owned()));
    let valid = info(&["v1beta1"]);
    assert_eq!(handler.validate(&valid), Ok(()));
    PluginHandler::register(&handler, &valid).await.expect("registered");
    agent.until_capacity(GPU, (1, 1)).await;
    assert!(node.directory.path().join("DEPRECATION").exists());
    handler.deregister(&valid).await;
    agent.until_capacity(GPU, (1, 0)).await;
    agent.stop().await;
}

#[tokio::test]
async fn a_damaged_checkpoint_starts_without_assignments() {
    // AC-06c-12, AC-06c-13
    for (content, resources) in [
        (r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}"#, 0),
        ("{", 0),
        ("", 0),
        (r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":3467439661}"#, 0),
        (
            r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{"example.com/res":["dev1","dev2"]}},"Checksum":2068760492}"#,
            1,
        ),
    ] {
        let node = Node::new();
        std::fs::write(node.checkpoint(), content).expect("written");
        let agent = node.start().await;
        assert_eq!(agent.manager.capacity().borrow().len(), resources, "{content}");
        assert!(agent.manager.has_checkpoint());
        agent.stop().await;
    }
}
