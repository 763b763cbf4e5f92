//! CSI driver entries of the node and its CSINode, edited in place. Pure.
//!
//! Implements spec 07 §12.2.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use berth_ports::NodeDriver;

/// Annotation that maps each driver to its id of the node.
const NODE_IDS: &str = "csi.volume.kubernetes.io/nodeid";

/// Why a driver entry is invalid.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DriverConflict {
    /// The driver reported no node id.
    #[error("error adding CSI driver node info: driverNodeID must not be empty")]
    NoNodeId,
    /// A topology label of the node has another value.
    #[error(
        "detected topology value collision: driver reported {key:?}:{reported:?} but existing label is {key:?}:{existing:?}"
    )]
    Label {
        /// Label key.
        key: String,
        /// Value reported by the driver.
        reported: String,
        /// Value on the node.
        existing: String,
    },
}

fn node_ids(node: &Value) -> BTreeMap<String, String> {
    let text = node.pointer("/metadata/annotations").and_then(|all| all.get(NODE_IDS)).and_then(Value::as_str);
    // An annotation that cannot be parsed is replaced.
    text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}

fn patch(node: &Value, annotations: Value, labels: Map<String, Value>) -> Value {
    let mut metadata = json!({"annotations": annotations});
    if !labels.is_empty() {
        metadata["labels"] = Value::Object(labels);
    }
    // Must not apply to a node that was recreated under the same name.
    if let Some(uid) = node.pointer("/metadata/uid") {
        metadata["uid"] = uid.clone();
    }
    json!({"metadata": metadata})
}

/// Builds the node status patch that adds a driver; `None` if nothing differs.
///
/// # Errors
/// The driver has no node id or contradicts a label.
pub fn node_with(node: &Value, driver: &NodeDriver) -> Result<Option<Value>, DriverConflict> {
    if driver.node_id.is_empty() {
        return Err(DriverConflict::NoNodeId);
    }
    let mut labels = Map::new();
    for (key, value) in &driver.topology {
        match node.pointer("/metadata/labels").and_then(|all| all.get(key)).and_then(Value::as_str) {
            Some(existing) if existing == value => {}
            Some(existing) => {
                let (key, reported, existing) = (key.clone(), value.clone(), existing.to_owned());
                return Err(DriverConflict::Label { key, reported, existing });
            }
            None => drop(labels.insert(key.clone(), json!(value))),
        }
    }
    let mut ids = node_ids(node);
    let before = ids.insert(driver.name.clone(), driver.node_id.clone());
    if before.as_ref() == Some(&driver.node_id) && labels.is_empty() {
        return Ok(None);
    }
    Ok(Some(patch(node, json!({NODE_IDS: json!(ids).to_string()}), labels)))
}

/// Builds the node status patch that removes a driver; `None` if it is absent. Labels stay.
pub fn node_without(node: &Value, driver: &str) -> Option<Value> {
    let mut ids = node_ids(node);
    ids.remove(driver)?;
    let text = if ids.is_empty() { Value::Null } else { json!(json!(ids).to_string()) };
    Some(patch(node, json!({NODE_IDS: text}), Map::new()))
}

/// Attach limit of the node; `None` if unlimited.
fn count(max_volumes: i64) -> Option<i32> {
    (max_volumes > 0).then(|| i32::try_from(max_volumes).unwrap_or(i32::MAX))
}

/// Builds the CSINode entry of a driver.
pub fn entry(driver: &NodeDriver) -> Value {
    let keys: Vec<&String> = driver.topology.keys().collect();
    let mut entry = json!({"name": driver.name, "nodeID": driver.node_id, "topologyKeys": keys});
    if let Some(count) = count(driver.max_volumes) {
        entry["allocatable"] = json!({"count": count});
    }
    entry
}

/// Change that a CSINode needs.
#[derive(Clone, PartialEq, Debug)]
pub enum Edit {
    /// The object is up to date.
    Nothing,
    /// Write this object.
    Write(Value),
    /// Write this object, then edit again: a driver's node id and topology keys are immutable, so it is removed and
    /// re-added.
    Step(Value),
}

fn drivers(csi_node: &mut Value) -> Option<&mut Vec<Value>> {
    let spec = csi_node.as_object_mut()?.entry("spec").or_insert_with(|| json!({}));
    let drivers = spec.as_object_mut()?.entry("drivers").or_insert_with(|| json!([]));
    if drivers.is_null() {
        *drivers = json!([]);
    }
    drivers.as_array_mut()
}

fn keys(entry: &Value) -> Vec<&str> {
    let mut keys: Vec<&str> =
        entry["topologyKeys"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    keys.sort_unstable();
    keys
}

/// Adds or updates a driver.
pub fn add_driver(mut csi_node: Value, driver: &NodeDriver) -> Edit {
    let wanted = entry(driver);
    let Some(all) = drivers(&mut csi_node) else { return Edit::Nothing };
    let Some(at) = all.iter().position(|known| known["name"] == wanted["name"]) else {
        all.push(wanted);
        return Edit::Write(written(csi_node));
    };
    let Some(known) = all.get_mut(at) else { return Edit::Nothing };
    if known["nodeID"] != wanted["nodeID"] || keys(known) != keys(&wanted) {
        all.remove(at);
        return Edit::Step(written(csi_node));
    }
    if known.pointer("/allocatable/count") == wanted.pointer("/allocatable/count") {
        return Edit::Nothing;
    }
    match wanted.get("allocatable") {
        Some(allocatable) => known["allocatable"] = allocatable.clone(),
        None => drop(known.as_object_mut().and_then(|known| known.remove("allocatable"))),
    }
    Edit::Write(written(csi_node))
}

/// Removes a driver from `spec.drivers` of the CSINode; no edit if it is absent.
pub fn remove_driver(mut csi_node: Value, driver: &str) -> Edit {
    let Some(all) = drivers(&mut csi_node) else { return Edit::Nothing };
    let before = all.len();
    all.retain(|known| known["name"] != driver);
    if all.len() == before { Edit::Nothing } else { Edit::Write(written(csi_node)) }
}

/// The object to write, without server-managed fields.
fn written(mut csi_node: Value) -> Value {
    if let Some(metadata) = csi_node.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("managedFields");
    }
    csi_node
}

#[cfg(test)]
mod tests {
    use super::*;

    fn driver(max_volumes: i64, topology: &[(&str, &str)]) -> NodeDriver {
        let topology = topology.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        NodeDriver { name: "d".to_owned(), node_id: "id".to_owned(), topology, max_volumes }
    }

    #[test]
    fn limits_are_written_where_there_are_any() {
        // AC-07-23
        for (max, expected) in [(0, None), (5, Some(5)), (-1, None), (i64::MAX, Some(i64::from(i32::MAX)))] {
            let entry = entry(&driver(max, &[]));
            assert_eq!(entry.pointer("/allocatable/count").and_then(Value::as_i64), expected, "{max}");
        }
    }

    #[test]
    fn a_conflicting_topology_label_is_an_error() {
        // AC-07-24
        let node = json!({"metadata": {"uid": "u", "labels": {"zone": "a"}}});
        let error = node_with(&node, &driver(0, &[("zone", "b")])).expect_err("a collision");
        let text = r#"detected topology value collision: driver reported "zone":"b" but existing label is "zone":"a""#;
        assert_eq!(error.to_string(), text);
        let nameless = NodeDriver { node_id: String::new(), ..driver(0, &[]) };
        let error = node_with(&node, &nameless).expect_err("no ID").to_string();
        assert_eq!(error, "error adding CSI driver node info: driverNodeID must not be empty");
    }

    #[test]
    fn the_node_annotation_lists_driver_node_ids() {
        let other =
            json!({"metadata": {"uid": "u", "annotations": {NODE_IDS: "{\"e\":\"x\"}"}, "labels": {"zone": "a"}}});
        let patch = node_with(&other, &driver(0, &[("zone", "a"), ("rack", "7")])).expect("fits");
        let expected = json!({"metadata": {"uid": "u", "labels": {"rack": "7"},
            "annotations": {NODE_IDS: r#"{"d":"id","e":"x"}"#}}});
        assert_eq!(patch, Some(expected));
        let both = json!({"metadata": {"annotations": {NODE_IDS: r#"{"d":"id","e":"x"}"#}, "labels": {"rack": "7"}}});
        assert_eq!(node_with(&both, &driver(0, &[("rack", "7")])), Ok(None));
        let gone = json!({"metadata": {"annotations": {NODE_IDS: r#"{"e":"x"}"#}}});
        assert_eq!(node_without(&both, "d"), Some(gone));
        let last = json!({"metadata": {"annotations": {NODE_IDS: r#"{"d":"id"}"#}}});
        assert_eq!(node_without(&last, "d"), Some(json!({"metadata": {"annotations": {NODE_IDS: null}}})));
        assert_eq!(node_without(&last, "f"), None);
        let broken = json!({"metadata": {"annotations": {NODE_IDS: "{"}}});
        assert!(node_with(&broken, &driver(0, &[])).is_ok_and(|patch| patch.is_some()));
    }

    #[test]
    fn a_csi_node_keeps_what_is_not_ours() {
        // AC-10-39
        let empty = json!({"metadata": {"name": "n", "managedFields": []}, "spec": {"drivers": null}});
        let Edit::Write(one) = add_driver(empty, &driver(5, &[("z", "1"), ("a", "2")])) else { panic!("it is new") };
        let expected = json!({"name": "d", "nodeID": "id", "topologyKeys": ["a", "z"], "allocatable": {"count": 5}});
        assert_eq!(one, json!({"metadata": {"name": "n"}, "spec": {"drivers": [expected]}}));
        assert_eq!(add_driver(one.clone(), &driver(5, &[("z", "1"), ("a", "2")])), Edit::Nothing);

        let mut newer = one.clone();
        newer["spec"]["drivers"][0]["later"] = json!(1);
        let Edit::Write(less) = add_driver(newer.clone(), &driver(3, &[("z", "1"), ("a", "2")])) else {
            panic!("a limit")
        };
        assert_eq!(less["spec"]["drivers"][0]["later"], 1);
        assert_eq!(less["spec"]["drivers"][0]["allocatable"]["count"], 3);
        let Edit::Write(none) = add_driver(newer.clone(), &driver(0, &[("z", "1"), ("a", "2")])) else {
            panic!("no limit")
        };
        assert_eq!(none["spec"]["drivers"][0].get("allocatable"), None);

        // What a driver calls the node cannot be changed in one step.
        let Edit::Step(without_it) = add_driver(newer.clone(), &driver(5, &[])) else { panic!("other keys") };
        assert_eq!(without_it["spec"]["drivers"], json!([]));
        let Edit::Write(gone) = remove_driver(newer, "d") else { panic!("it is there") };
        assert_eq!(gone["spec"]["drivers"], json!([]));
        assert_eq!(remove_driver(gone, "d"), Edit::Nothing);
        assert_eq!(add_driver(json!([]), &driver(0, &[])), Edit::Nothing);
    }
}
