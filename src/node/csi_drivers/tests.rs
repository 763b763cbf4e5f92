//! Tests of publishing CSI drivers to Node and CSINode: changes, topology conflicts, retries, recreated objects.

use serde_json::json;

use super::*;
use crate::node::fixture::Fixture;
use berth_api::testing::refused;

const NODE_IDS: &str = "csi.volume.kubernetes.io/nodeid";

fn driver(name: &str, zone: &str, max_volumes: i64) -> NodeDriver {
    let topology = BTreeMap::from([("zone".to_owned(), zone.to_owned())]);
    NodeDriver { name: name.to_owned(), node_id: format!("{name}-id"), topology, max_volumes }
}

fn world() -> (Fixture, Arc<CsiDrivers>) {
    let world = Fixture::new();
    world.put("nodes", Some(json!({"metadata": {"name": "n", "uid": "u"}})));
    world.put("csinodes", Some(created("n", "u")));
    let drivers = CsiDrivers::new(world.deps().api, "n");
    (world, drivers)
}

#[tokio::test(start_paused = true)]
async fn drivers_come_and_go_in_both_objects() {
    // AC-07-23
    let (world, drivers) = world();
    drivers.install(&driver("d", "a", 5)).await.expect("written");
    drivers.install(&driver("e", "a", 0)).await.expect("written");
    let expected = json!([
        {"name": "d", "nodeID": "d-id", "topologyKeys": ["zone"], "allocatable": {"count": 5}},
        {"name": "e", "nodeID": "e-id", "topologyKeys": ["zone"]},
    ]);
    assert_eq!(world.get("csinodes")["spec"]["drivers"], expected);
    assert_eq!(world.get("nodes")["metadata"]["annotations"][NODE_IDS], r#"{"d":"d-id","e":"e-id"}"#);
    assert_eq!(world.get("nodes")["metadata"]["labels"], json!({"zone": "a"}));

    let before = world.lines("GET").len();
    drivers.install(&driver("d", "a", 5)).await.expect("nothing to do");
    assert_eq!(world.lines("GET").len(), before, "no write if equal");
    drivers.update(&driver("d", "a", 3)).await.expect("written");
    assert_eq!(world.get("csinodes")["spec"]["drivers"][0]["allocatable"]["count"], 3);

    drivers.uninstall("d").await.expect("written");
    drivers.uninstall("e").await.expect("written");
    assert_eq!(world.get("csinodes")["spec"]["drivers"], json!([]));
    assert!(world.get("nodes")["metadata"]["annotations"].get(NODE_IDS).is_none());
    assert_eq!(world.get("nodes")["metadata"]["labels"], json!({"zone": "a"}), "labels stay");
}

#[tokio::test(start_paused = true)]
async fn a_topology_collision_is_an_error_and_nothing_is_written() {
    // AC-07-24
    let (world, drivers) = world();
    drivers.install(&driver("d", "a", 0)).await.expect("written");
    let error = drivers.install(&driver("e", "b", 0)).await.expect_err("a collision");
    let text = "error updating Node object with CSI driver node info: detected topology value collision: driver \
                reported \"zone\":\"b\" but existing label is \"zone\":\"a\"";
    assert_eq!(error, text);
    assert_eq!(world.get("csinodes")["spec"]["drivers"].as_array().map(Vec::len), Some(1));
}

#[tokio::test(start_paused = true)]
async fn writes_are_tried_four_times() {
    let (world, drivers) = world();
    for line in ["PATCH nodes/status", "PUT csinodes", "PUT csinodes", "PUT csinodes"] {
        world.fail(line, refused(409, "Conflict", "the object has been modified"));
    }
    drivers.install(&driver("d", "a", 0)).await.expect("in the end");
    for _ in 0..4 {
        world.fail("PUT csinodes", refused(500, "InternalError", "no"));
    }
    let error = drivers.update(&driver("d", "a", 9)).await.expect_err("four times is enough");
    assert_eq!(error, "error updating CSINode object with CSI driver node info: no");
}

#[tokio::test(start_paused = true)]
async fn a_csi_node_that_is_missing_or_foreign_is_made() {
    let (world, drivers) = world();
    world.put("csinodes", None);
    drivers.install(&driver("d", "a", 0)).await.expect("written");
    assert_eq!(world.get("csinodes")["metadata"]["ownerReferences"][0]["uid"], "u");
    world.put("csinodes", Some(created("n", "another")));
    drivers.update(&driver("d", "a", 1)).await.expect("written");
    assert_eq!(world.get("csinodes")["metadata"]["ownerReferences"][0]["uid"], "u");
    assert_eq!(world.get("csinodes")["spec"]["drivers"][0]["allocatable"]["count"], 1);
}

#[tokio::test(start_paused = true)]
async fn all_drivers_are_published_to_a_new_node() {
    let (world, drivers) = world();
    tokio::spawn(drivers.clone().follow(world.deps().nodes, world.stop.clone()));
    drivers.install(&driver("d", "a", 0)).await.expect("written");
    world.put("nodes", None);
    world.put("csinodes", None);
    world.put("nodes", Some(json!({"metadata": {"name": "n", "uid": "new"}})));
    let is_published = |world: &Fixture| {
        world.get("nodes")["metadata"]["annotations"][NODE_IDS] == r#"{"d":"d-id"}"#
            && world.get("csinodes")["spec"]["drivers"][0]["name"] == "d"
    };
    world.until("the new node has the status", is_published).await;
    assert_eq!(world.get("csinodes")["metadata"]["ownerReferences"][0]["uid"], "new");
}
