//! Plugins on a node without an API server: CSI drivers, device plugins, and DRA drivers register (spec 06c §2).

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use berth_proto::device_plugin::DevicePluginOptions;
use berth_resources::dra::{ClaimKey, ClaimState, Claims, checkpoint};
use berth_testkit::{
    csi::{CsiDriver, DriverProperties, Plugin},
    device_plugin::{SamplePlugin, healthy},
    dra_driver::{DriverMethod, SampleDriver, V1},
    process::{Agent, manifest, skips},
};
use berth_types::PodUid;

use crate::agent::ScriptedServer;

const DRIVER: &str = "gpu.example.com";
/// Sockets whose plugins are registered.
const REGISTERED: &str = "state=\"actual_state_of_world\"";

async fn registered_sockets(agent: &Agent) -> usize {
    let page = agent.metrics().await;
    let series = page.lines().filter(|line| line.starts_with("plugin_manager_total_plugins{"));
    series.filter(|line| line.contains(REGISTERED)).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plugins_of_all_types_register_without_an_api_server() {
    if skips("plugins_of_all_types_register_without_an_api_server") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let home = runtime.home();
    let registry = home.root().join("plugins_registry");
    let volumes = home.path().join("volumes");
    let agent = home.start().await;
    let csi = CsiDriver::start(DriverProperties::of("disk.example.com"), &home.root(), &volumes).await;
    let disk = Plugin::csi(&registry.join("disk-reg.sock"), "disk.example.com", &csi.endpoint, &["1.9.0"]);
    let dra = SampleDriver::start(&home.root(), DRIVER, &[V1]);
    let gpu = dra.serve_registration(&registry);
    let options = DevicePluginOptions::default();
    let plugin = SamplePlugin::start(&home.root().join("plugins"), "nic.sock", "example.com/nic", options);
    plugin.set_devices(vec![healthy("n1")]);
    let nic = plugin.serve_registration(&registry);
    for registration in [&disk, &gpu, &nic] {
        registration.registered().await;
    }
    agent.until("three plugins are registered", async || registered_sockets(&agent).await == 3).await;
    assert!(csi.calls().iter().any(|call| call.method == "NodeGetInfo"), "{:?}", csi.calls());

    // A driver whose socket is gone is deregistered, and registers again.
    drop(disk);
    agent.until("the CSI driver is deregistered", async || registered_sockets(&agent).await == 2).await;
    let disk = Plugin::csi(&registry.join("disk-reg.sock"), "disk.example.com", &csi.endpoint, &["1.9.0"]);
    disk.registered().await;
    drop(agent);
}

/// A node that left its cluster still has claims that its drivers have prepared.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_of_an_earlier_agent_are_released_without_an_api_server() {
    // Spec 06c §3.5
    if skips("claims_of_an_earlier_agent_are_released_without_an_api_server") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let home = runtime.home();
    let key = ClaimKey { namespace: "default".to_owned(), name: "one".to_owned() };
    let claim = ClaimState {
        uid: "claim-uid".to_owned(),
        pods: BTreeSet::from([PodUid::from("gone")]),
        drivers: BTreeMap::from([(DRIVER.to_owned(), Vec::new())]),
        is_prepared: false,
    };
    let state = home.root().join("dra_manager_state");
    fs::write(&state, checkpoint::encode(&Claims::from([(key, claim)]))).expect("written");
    home.put_pod(&manifest("web"));
    let agent = home.start().await;
    agent.until_ready("web").await;
    let driver = SampleDriver::start(&home.root(), DRIVER, &[V1]);
    let registration = driver.serve_registration(&home.root().join("plugins_registry"));
    registration.registered().await;
    // The end of a pod is a reason to remove the state of pods that are gone; otherwise it is removed every minute.
    home.remove("web.json");
    let calls = driver.wait_for_calls(DriverMethod::NodeUnprepareResources, 1).await;
    assert_eq!(calls[0].claims[0].uid, "claim-uid");
    let is_empty = async || {
        let content = fs::read(&state).expect("a checkpoint");
        checkpoint::decode(&content).is_ok_and(|claims| claims.is_empty())
    };
    agent.until("the claim is released", is_empty).await;
    drop(agent);
}
