//! Tests of the CSINode against a server that is away, has one already, or has one of another node.

use serde_json::json;

use super::*;
use crate::node::fixture::Fixture;
use berth_api::testing::refused;

fn start(world: &Fixture) -> watch::Receiver<Option<String>> {
    let deps = world.deps();
    let (storage, trouble) = watch::channel(Some(UNINITIALIZED.to_owned()));
    let csi = CsiNodeInitializer {
        api: deps.api,
        nodes: deps.nodes,
        name: "n".to_owned(),
        registered: watch::channel(false).1,
        storage,
    };
    tokio::spawn(csi.run(world.stop.clone()));
    trouble
}

fn node(world: &Fixture, uid: &str) {
    world.put("nodes", Some(json!({"metadata": {"name": "n", "uid": uid}})));
}

#[tokio::test(start_paused = true)]
async fn it_is_made_once_the_server_and_the_node_are_there() {
    let world = Fixture::new();
    world.fail("GET csinodes", refused(503, "ServiceUnavailable", "x"));
    let mut trouble = start(&world);
    world.until("asked for the node", |world| world.lines("").contains(&"GET nodes".to_owned())).await;
    assert_eq!(world.lines("")[..2], ["GET csinodes", "GET csinodes"]);
    assert_eq!(world.api.calls()[0].query, [("resourceVersion", "0".to_owned())]);
    assert!(trouble.borrow().is_some());
    node(&world, "u");
    assert!(trouble.wait_for(Option::is_none).await.is_ok());
    assert_eq!(world.get("csinodes")["metadata"]["ownerReferences"][0]["uid"], "u");
    assert_eq!(world.get("csinodes")["spec"]["drivers"], json!([]));
}

#[tokio::test(start_paused = true)]
async fn one_that_is_there_costs_one_request() {
    let world = Fixture::new();
    node(&world, "u");
    world.put("csinodes", Some(created("n", "u")));
    assert!(start(&world).wait_for(Option::is_none).await.is_ok());
    assert_eq!(world.lines(""), ["GET csinodes"]);
}

#[tokio::test(start_paused = true)]
async fn a_conflict_is_retried_on_a_fresh_object_and_unknown_fields_survive() {
    // AC-10-39
    let world = Fixture::new();
    node(&world, "u");
    let found = json!({"metadata": {"name": "n"}, "spec": {"drivers": [{"name": "d", "later": 1}]}});
    world.put("csinodes", Some(found));
    world.fail("PUT csinodes", refused(409, "Conflict", "x"));
    assert!(start(&world).wait_for(Option::is_none).await.is_ok());
    assert_eq!(world.lines(""), ["GET csinodes", "PUT csinodes", "GET csinodes", "PUT csinodes"]);
    assert_eq!(world.get("csinodes")["spec"]["drivers"][0]["later"], 1);
}

#[tokio::test(start_paused = true)]
async fn that_of_another_node_is_replaced_and_a_new_node_gets_its_own() {
    let world = Fixture::new();
    node(&world, "u");
    world.put("csinodes", Some(created("n", "old")));
    assert!(start(&world).wait_for(Option::is_none).await.is_ok());
    assert_eq!(world.lines(""), ["GET csinodes", "DELETE csinodes", "POST csinodes"]);
    world.put("nodes", None);
    world.put("csinodes", None);
    node(&world, "new");
    let owner = |world: &Fixture| world.get("csinodes").pointer("/metadata/ownerReferences/0/uid").cloned();
    world.until("made for the new node", |world| owner(world) == Some(json!("new"))).await;
}
