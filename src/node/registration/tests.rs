//! Tests of registration against a server that rejects, fails, or has the node already.

use serde_json::json;
use tokio::time::Instant;

use crate::node::fixture::{Fixture, config, line};
use berth_api::{api::RequestClass, testing::refused};

#[tokio::test(start_paused = true)]
async fn a_node_is_made_whole() {
    let world = Fixture::new();
    world.start(config());
    world.until("registered", |world| world.get("nodes").is_object()).await;
    let call = &world.calls("POST nodes")[0];
    let node: serde_json::Value = serde_json::from_slice(&call.body.as_ref().expect("a body").bytes).expect("JSON");
    assert_eq!(node["metadata"]["labels"]["kubernetes.io/hostname"], "n");
    assert_eq!(node["status"]["addresses"][0], json!({"type": "InternalIP", "address": "10.0.0.2"}));
    assert_eq!(node["status"]["conditions"][3]["type"], "Ready");
    assert_eq!(node["apiVersion"], "v1");
    assert_eq!(node["kind"], "Node");
}

#[tokio::test(start_paused = true)]
async fn who_may_not_make_the_node_takes_the_one_that_is_there() {
    // AC-10-2, AC-05-23
    let world = Fixture::new();
    let labels = json!({"kubernetes.io/hostname": "old", "x": "y"});
    let taint = json!([{"key": "k", "effect": "NoSchedule"}]);
    world.put("nodes", Some(json!({"metadata": {"name": "n", "labels": labels}, "spec": {"taints": taint}})));
    world.fail("POST nodes", refused(403, "Forbidden", "x"));
    world.start(config());
    world.until("ready", |world| world.condition("Ready")["status"] == "True").await;
    let of_nodes = world.api.calls().into_iter().filter(|call| call.resource.plural == "nodes");
    let lines: Vec<String> = of_nodes.filter(|call| call.line == RequestClass::Main).map(|call| line(&call)).collect();
    assert_eq!(lines, ["POST nodes", "GET nodes", "PATCH nodes/status"]);
    let node = world.get("nodes");
    assert_eq!(node["metadata"]["labels"]["kubernetes.io/hostname"], "n");
    assert_eq!((&node["metadata"]["labels"]["x"], &node["spec"]["taints"]), (&json!("y"), &taint));
}

#[tokio::test(start_paused = true)]
async fn attempts_come_ever_more_slowly() {
    // AC-10-3
    let world = Fixture::new();
    for _ in 0..3 {
        world.fail("POST nodes", refused(500, "InternalError", "x"));
    }
    let began = Instant::now();
    world.start(config());
    let mut at = Vec::new();
    for count in 1..=4 {
        world.until("tried again", |world| world.calls("POST nodes").len() == count).await;
        at.push(began.elapsed().as_millis());
    }
    let expected = [100, 300, 700, 1500];
    assert!(at.iter().zip(expected).all(|(at, expected)| (expected..expected + 50).contains(at)), "{at:?}");
}

#[tokio::test(start_paused = true)]
async fn an_invalid_registration_is_reported_once() {
    let world = Fixture::new();
    for _ in 0..3 {
        world.fail("POST nodes", refused(422, "Invalid", "spec.taints: bad"));
    }
    world.start(config());
    world.until("registered", |world| world.get("nodes").is_object()).await;
    assert_eq!(world.events.take().iter().filter(|reason| *reason == "APIWriteRefused").count(), 1);
}

#[tokio::test(start_paused = true)]
async fn labels_of_the_object_are_not_forgotten_while_it_is_registered() {
    let world = Fixture::new();
    let ours = json!({"metadata": {"name": "n", "labels": {"disk": "fast"}}});
    world.put("nodes", Some(ours));
    world.fail("POST nodes", refused(500, "InternalError", "x"));
    world.start(config());
    world.until("known", |world| world.facts.borrow().labels.contains_key("disk")).await;
    for _ in 0..1000 {
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        assert!(world.facts.borrow().labels.contains_key("disk"));
    }
}
