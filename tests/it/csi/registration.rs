//! Plugin registration: well-behaved and hostile plugins, and removal of their sockets.
//!
//! Spec 06c §2, 07 §12.1.

use std::{fs, path::Path};

use berth_ports::NodeDriver;
use serde_json::json;

use crate::csi::{DRIVER, Fixture, a_moment};
use berth_testkit::{
    csi::{CsiDriver, DriverProperties, Plugin, RegistrationBehavior, RegistrationCall},
    process::skips,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_is_registered_and_deregistered_with_its_socket() {
    if skips("a_driver_is_registered_and_deregistered_with_its_socket") {
        return;
    }
    let world = Fixture::open();
    let mut nature = DriverProperties::of(DRIVER);
    nature.max_volumes = 5;
    nature.topology.insert("zone".to_owned(), "a".to_owned());
    let (_driver, plugin) = world.register(nature).await;
    let expected = NodeDriver {
        name: DRIVER.to_owned(),
        node_id: format!("{DRIVER}-node"),
        topology: [("zone".to_owned(), "a".to_owned())].into(),
        max_volumes: 5,
    };
    assert_eq!(world.objects.on_node(DRIVER), Some(expected));
    assert!(world.drivers.get(DRIVER).is_ok());
    assert_eq!(plugin.asked(), [RegistrationCall::Info, RegistrationCall::Registered]);
    let page = |state: &str| {
        let family = world.registry.gather().into_iter().find(|f| f.name() == "plugin_manager_total_plugins");
        let series = family.map(|f| f.get_metric().to_vec()).unwrap_or_default();
        series.iter().filter(|m| m.get_label().iter().any(|label| label.value() == state)).count()
    };
    until("it is counted", || (page("actual_state_of_world"), page("desired_state_of_world")) == (1, 1)).await;
    drop(plugin);
    until("deregistered", || world.drivers.get(DRIVER).is_err() && world.objects.on_node(DRIVER).is_none()).await;
    until("its series are gone", || page("actual_state_of_world") + page("desired_state_of_world") == 0).await;
    let error = world.drivers.get(DRIVER).map(drop).expect_err("gone");
    assert_eq!(error, format!("driver name {DRIVER} not found in the list of registered CSI drivers"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_socket_that_is_made_again_is_another_plugin() {
    // AC-06c-16
    if skips("a_socket_that_is_made_again_is_another_plugin") {
        return;
    }
    let world = Fixture::open();
    let (driver, plugin) = world.register(DriverProperties::of(DRIVER)).await;
    for _ in 0..3 {
        drop(Plugin::csi(&world.socket("stray"), "stray", Path::new("/nowhere"), &["1.0.0"]));
    }
    let before = driver.of("NodeGetInfo").len();
    // Renamed over the old one: the path is a socket at any time.
    let next = world.root.join("next.sock");
    let again = Plugin::csi(&next, DRIVER, &driver.endpoint, &["1.9.0"]);
    fs::rename(&next, world.socket(DRIVER)).expect("renamed");
    again.registered().await;
    assert_eq!(driver.of("NodeGetInfo").len(), before + 1);
    assert!(world.drivers.get(DRIVER).is_ok());
    drop((plugin, again));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_there_before_the_watcher_and_what_lies_deeper_is_found() {
    // AC-06c-15
    if skips("what_was_there_before_the_watcher_and_what_lies_deeper_is_found") {
        return;
    }
    let world = Fixture::open();
    let driver = CsiDriver::start(DriverProperties::of(DRIVER), &world.root, &world.data).await;
    let early = Plugin::csi(&world.plugins().join("a/b/early.sock"), DRIVER, &driver.endpoint, &["1.0.0"]);
    let hidden = Plugin::csi(&world.plugins().join(".x.sock"), "hidden", &driver.endpoint, &["1.0.0"]);
    fs::write(world.plugins().join("file.sock"), "x").expect("written");
    world.watch();
    early.registered().await;
    let late = Plugin::csi(&world.plugins().join("c/d/late.sock"), "late.example.com", &driver.endpoint, &["1.0.0"]);
    late.registered().await;
    assert_eq!(hidden.asked(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rejected_plugin_gets_the_reason() {
    // AC-06c-14, AC-07-22
    if skips("a_rejected_plugin_gets_the_reason") {
        return;
    }
    let world = Fixture::open();
    let (driver, _plugin) = world.register(DriverProperties::of(DRIVER)).await;
    let endpoint = driver.endpoint.clone();
    let refused = async |name: &str, endpoint: &Path, versions: &[&str]| {
        Plugin::csi(&world.socket("other"), name, endpoint, versions).refused().await
    };
    let lower = refused(DRIVER, &endpoint, &["1.2.0"]).await;
    let text = "Another driver with the same name is already registered with a higher supported version: \"1.9.0\"";
    assert!(
        lower.starts_with("RegisterPlugin error -- plugin validation failed with err: ") && lower.ends_with(text),
        "{lower}"
    );
    let none = refused("new.example.com", &endpoint, &[]).await;
    assert!(none.ends_with("Plugin returned an empty list for supported versions"), "{none}");
    let old = refused("new.example.com", &endpoint, &["0.3.0", "2.0.0"]).await;
    assert!(old.ends_with("highest supported version reported by driver is 0.3.0, must be v1.x"), "{old}");
    for name in ["../../etc", "", "a/b", &"x".repeat(64), "new line\n"] {
        let bad = refused(name, &endpoint, &["1.0.0"]).await;
        assert!(bad.contains("invalid driver name"), "{bad}");
    }
    let relative = refused("new.example.com", Path::new("csi.sock"), &["1.0.0"]).await;
    assert!(relative.contains("must be the absolute path"), "{relative}");
    let nowhere = refused("new.example.com", &world.root.join("nowhere.sock"), &["1.0.0"]).await;
    let begins = "RegisterPlugin error -- plugin registration failed with err: rpc error: code = Unavailable";
    assert!(nowhere.starts_with(begins), "{nowhere}");
    let socket = world.socket("gpu");
    let unknown =
        Plugin::start(&socket, "GPUPlugin", "gpu", String::new(), &["1"], RegistrationBehavior::Good).refused().await;
    let expected = format!(
        "RegisterPlugin error -- no handler registered for plugin type: GPUPlugin at socket {}",
        socket.display()
    );
    assert_eq!(unknown, expected);
    assert!(world.drivers.get(DRIVER).is_ok(), "nobody took its place");
    assert_eq!(world.objects.on_node("new.example.com"), None);
    let counted = world.registry.gather().into_iter().find(|family| family.name() == "csi_operations_seconds");
    let series = counted.map(|family| family.get_metric().to_vec()).unwrap_or_default();
    let drivers: Vec<&str> = series
        .iter()
        .flat_map(|one| one.get_label())
        .filter(|label| label.name() == "driver_name")
        .map(|l| l.value())
        .collect();
    assert!(!drivers.is_empty() && drivers.iter().all(|driver| *driver == DRIVER), "{drivers:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_higher_version_takes_the_place_and_the_old_socket_takes_nothing_along() {
    // AC-07-22
    if skips("a_higher_version_takes_the_place_and_the_old_socket_takes_nothing_along") {
        return;
    }
    let world = Fixture::open();
    let (driver, old) = world.register(DriverProperties::of(DRIVER)).await;
    let new = Plugin::csi(&world.socket("new"), DRIVER, &driver.endpoint, &["1.10.0"]);
    new.registered().await;
    drop(old);
    a_moment().await;
    assert!(world.drivers.get(DRIVER).is_ok() && world.objects.on_node(DRIVER).is_some());
    drop(new);
    until("deregistered", || world.drivers.get(DRIVER).is_err()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_plugins_block_no_others() {
    if skips("hostile_plugins_block_no_others") {
        return;
    }
    let world = Fixture::open();
    let (mut hostile, versions) = (Vec::new(), ["1.0.0"]);
    for (index, manners) in [RegistrationBehavior::Silent, RegistrationBehavior::Garbage, RegistrationBehavior::Deaf]
        .into_iter()
        .enumerate()
    {
        let (socket, name) = (world.socket(&format!("bad-{index}")), format!("bad-{index}"));
        hostile.push(Plugin::start(&socket, "CSIPlugin", &name, String::new(), &versions, manners));
    }
    let long = "x".repeat(100_000);
    let socket = world.socket("long");
    hostile.push(Plugin::start(&socket, "CSIPlugin", &long, String::new(), &versions, RegistrationBehavior::Good));
    let (driver, _plugin) = world.register(DriverProperties::of(DRIVER)).await;
    let csi = &world.csi;
    let usage = world.usage("p", json!({}));
    world.objects.driver(DRIVER, json!({"attachRequired": false, "fsGroupPolicy": "File"}));
    crate::csi::mount(csi, &usage).await;
    crate::csi::unmount(csi, &usage).await;
    assert_eq!(driver.mutating_calls().len(), 4);
    for plugin in &hostile {
        plugin.until("asked again", |asked| asked.len() >= 2).await;
    }
    for name in ["bad-0", "bad-1", "bad-2"] {
        assert!(world.drivers.get(name).is_err() && world.objects.on_node(name).is_none(), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_written_is_tried_again() {
    // AC-07-24
    if skips("what_cannot_be_written_is_tried_again") {
        return;
    }
    let world = Fixture::open();
    world.objects.refuse(Some("detected topology value collision"));
    world.watch();
    let driver = CsiDriver::start(DriverProperties::of(DRIVER), &world.root, &world.data).await;
    let plugin = Plugin::csi(&world.socket(DRIVER), DRIVER, &driver.endpoint, &["1.0.0"]);
    let error = plugin.refused().await;
    assert_eq!(error, "RegisterPlugin error -- plugin registration failed with err: detected topology value collision");
    assert!(world.drivers.get(DRIVER).is_err());
    world.objects.refuse(None);
    plugin.registered().await;
    assert!(world.drivers.get(DRIVER).is_ok());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_node_is_asked_about_again_where_the_driver_wants_it() {
    if skips("the_node_is_asked_about_again_where_the_driver_wants_it") {
        return;
    }
    let world = Fixture::open();
    let (driver, _plugin) = world.register(DriverProperties::of(DRIVER)).await;
    a_moment().await;
    assert_eq!(driver.of("NodeGetInfo").len(), 1);
    driver.nature(|nature| nature.max_volumes = 7);
    world.objects.driver(DRIVER, json!({"nodeAllocatableUpdatePeriodSeconds": 10}));
    driver.until("asked again", |driver| driver.of("NodeGetInfo").len() >= 2).await;
    until("written", || world.objects.on_node(DRIVER).is_some_and(|driver| driver.max_volumes == 7)).await;
}

async fn until(what: &str, holds: impl Fn() -> bool) {
    let waiting = async {
        while !holds() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    let limit = std::time::Duration::from_secs(60);
    assert!(tokio::time::timeout(limit, waiting).await.is_ok(), "not within {limit:?}: {what}");
}
