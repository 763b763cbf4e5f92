//! Tests of status updates: content, timing, and rejections.

use serde_json::json;
use tokio::time::sleep;

use super::*;
use crate::node::fixture::{Fixture, config, lock, network_of};
use berth_api::testing::refused;
use berth_ports::RuntimeState;

const PATCH: &str = "PATCH nodes/status";

async fn ready() -> Fixture {
    let world = Fixture::new();
    world.start(config());
    world.until("ready", |world| world.condition("Ready")["status"] == "True").await;
    world
}

/// Waits for so many seconds, after which no update is in flight.
async fn quiet(seconds: u64) {
    sleep(Duration::from_secs(seconds)).await;
}

fn patch_of(call: &Call) -> Value {
    serde_json::from_slice(&call.body.as_ref().expect("a body").bytes).expect("JSON")
}

#[tokio::test(start_paused = true)]
async fn a_change_is_reported_at_once_and_nothing_else() {
    // AC-05-28
    let world = ready().await;
    quiet(30).await;
    let before = world.calls(PATCH).len();
    world.events.take();
    let trouble = "container runtime network not ready: NetworkReady=false reason:x message:y";
    world
        .runtime
        .send_replace(Arc::new(RuntimeState { network_error: Some(trouble.to_owned()), ..RuntimeState::default() }));
    let began = Instant::now();
    world.until("unready", |world| world.condition("Ready")["status"] == "False").await;
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    assert_eq!(world.condition("Ready")["message"], trouble);
    assert_eq!(world.events.take(), ["NodeNotReady"]);
    quiet(60).await;
    let calls = world.calls(PATCH);
    assert_eq!(calls.len(), before + 1);
    let last = calls.last().expect("one");
    assert_eq!(
        (last.line, last.query.clone()),
        (berth_api::api::RequestClass::Heartbeat, vec![("timeout", "10s".to_owned())])
    );
    let patch = patch_of(last);
    assert_eq!(patch["metadata"], json!({"uid": world.get("nodes")["metadata"]["uid"]}));
    assert_eq!(patch["status"]["$setElementOrder/conditions"].as_array().map(Vec::len), Some(4));
    let ready = &patch["status"]["conditions"][3];
    assert_eq!((&ready["type"], &ready["reason"]), (&json!("Ready"), &json!("KubeletNotReady")));
    let memory = &patch["status"]["conditions"][0];
    assert_eq!(memory.as_object().map(serde_json::Map::len), Some(2), "only type and heartbeat: {memory}");
}

#[tokio::test(start_paused = true)]
async fn an_unchanged_status_is_reported_once_per_period() {
    // AC-05-24
    let world = ready().await;
    quiet(400).await;
    let before = world.calls(PATCH).len();
    quiet(280).await;
    assert!(world.calls(PATCH).len() <= before + 1);
    quiet(320).await;
    let after = world.calls(PATCH).len();
    assert!((before + 1..=before + 2).contains(&after), "{before} {after}");
}

#[tokio::test(start_paused = true)]
async fn addresses_are_followed() {
    // AC-10-23
    let world = ready().await;
    world.network.set(network_of("10.0.0.9"));
    let address = |world: &Fixture| world.get("nodes")["status"]["addresses"][0]["address"].clone();
    world.until("moved", |world| address(world) == "10.0.0.9").await;
    let last = world.calls(PATCH).pop().expect("one");
    assert_eq!(patch_of(&last)["status"]["addresses"][2], json!({"$patch": "replace"}));
    assert_eq!(world.get("nodes")["status"]["addresses"].as_array().map(Vec::len), Some(2));
    world.until("facts", |world| world.facts.borrow().host_ips.iter().any(|ip| ip.to_string() == "10.0.0.9")).await;
}

#[tokio::test(start_paused = true)]
async fn failed_updates_are_retried_on_the_current_object() {
    let world = ready().await;
    quiet(30).await;
    let before = world.lines("lease").len();
    for _ in 0..2 {
        world.fail(PATCH, refused(500, "InternalError", "x"));
    }
    world.volumes.send_replace(Some(vec!["v".to_owned()]));
    world.until("told", |world| world.get("nodes")["status"]["volumesInUse"] == json!(["v"])).await;
    assert_eq!(world.lines("lease")[before..], [PATCH, "GET nodes", PATCH, "GET nodes", PATCH]);
    world.until("reported", |world| *lock(&world.reported) == ["v"]).await;
    for _ in 0..5 {
        world.fail(PATCH, refused(500, "InternalError", "x"));
    }
    world.volumes.send_replace(Some(vec!["w".to_owned()]));
    let began = Instant::now();
    world.until("told", |world| world.get("nodes")["status"]["volumesInUse"] == json!(["w"])).await;
    assert!(began.elapsed() > Duration::from_secs(9), "after five attempts the next sync publishes it");
}

#[tokio::test(start_paused = true)]
async fn what_the_server_will_not_take_is_not_sent_again() {
    let world = ready().await;
    quiet(30).await;
    let before = world.calls(PATCH).len();
    world.fail(PATCH, refused(422, "Invalid", "status.addresses[1]: Duplicate value"));
    world.volumes.send_replace(Some(vec!["v".to_owned()]));
    quiet(100).await;
    assert_eq!(world.calls(PATCH).len(), before + 1);
    assert_eq!(world.events.take().iter().filter(|reason| *reason == "APIWriteRefused").count(), 1);
    world.volumes.send_replace(Some(vec!["w".to_owned()]));
    world.until("told", |world| world.get("nodes")["status"]["volumesInUse"] == json!(["w"])).await;
}

#[tokio::test(start_paused = true)]
async fn a_node_made_again_is_met_as_such() {
    let world = ready().await;
    quiet(30).await;
    let mut node = world.get("nodes");
    node["metadata"]["uid"] = json!("new");
    node["status"]["volumesInUse"] = json!(["old"]);
    // The watch lags: our copy is of the old node, and the server rejects its UID.
    {
        let mut objects = lock(&world.objects);
        node["metadata"]["resourceVersion"] = json!("1000");
        objects.objects.insert("nodes", node);
    }
    world.volumes.send_replace(Some(vec!["v".to_owned()]));
    world.until("told", |world| world.get("nodes")["status"]["volumesInUse"] == json!(["v"])).await;
    assert_eq!(world.get("nodes")["metadata"]["uid"], "new");
}

#[tokio::test(start_paused = true)]
async fn a_deleted_node_is_made_again_only_where_that_is_wanted() {
    for (reregister, posts) in [(false, 1), (true, 2)] {
        let world = Fixture::new();
        world.start(ClusterConfig { reregister, ..config() });
        world.until("ready", |world| world.condition("Ready")["status"] == "True").await;
        quiet(30).await;
        world.put("nodes", None);
        quiet(60).await;
        assert_eq!(world.calls("POST nodes").len(), posts, "{reregister}");
        world.stop.cancel();
    }
}

#[tokio::test(start_paused = true)]
async fn pod_ranges_reach_the_runtime() {
    let world = ready().await;
    let mut node = world.get("nodes");
    node["spec"] = json!({"podCIDR": "10.1.0.0/24", "podCIDRs": ["10.1.0.0/24", "fd00::/64"]});
    world.put("nodes", Some(node));
    world.until("told", |world| *world.pod_cidr.borrow() == "10.1.0.0/24,fd00::/64").await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_drops_what_it_does_not_know_is_not_flooded() {
    let world = ready().await;
    quiet(30).await;
    let before = world.calls(PATCH).len();
    world.facts.send_modify(|facts| Arc::make_mut(facts).declared_features = vec!["New".to_owned()]);
    for _ in 0..100 {
        quiet(1).await;
        let mut node = world.get("nodes");
        if node["status"]["declaredFeatures"].is_array() {
            node["status"]["declaredFeatures"] = Value::Null;
            world.put("nodes", Some(node));
        }
    }
    let count = world.calls(PATCH).len() - before;
    assert!((8..=11).contains(&count), "{count}");
}

#[tokio::test(start_paused = true)]
async fn being_lost_and_found_is_a_transition() {
    // 10a §21: the control plane marks the node Unknown when it receives no heartbeat.
    let world = ready().await;
    quiet(30).await;
    world.events.take();
    let mut node = world.get("nodes");
    for condition in node["status"]["conditions"].as_array_mut().expect("conditions") {
        condition["status"] = json!("Unknown");
        condition["reason"] = json!("NodeStatusUnknown");
    }
    world.put("nodes", Some(node));
    world.until("ready", |world| world.condition("Ready")["status"] == "True").await;
    assert_eq!(world.condition("MemoryPressure")["reason"], "KubeletHasSufficientMemory");
    let since = world.condition("Ready")["lastTransitionTime"].as_str().expect("a time").to_owned();
    assert!(since.as_str() >= "2026-01-01T00:00:30Z", "{since}");
    assert_eq!(world.events.take().last().map(String::as_str), Some("NodeReady"));
}
