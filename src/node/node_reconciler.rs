//! Reconciles an existing node object at registration. Pure. Implements spec 05 §4.2.
//!
//! Changes only what kubelet owns: default labels, the attach annotation, huge pages, and extended resources without a
//! device checkpoint. Taints and other labels stay.

use super::initial_node::ATTACH_DETACH;
use berth_types::{
    api,
    resources::{Quantities, is_extended, is_hugepage, zero},
};

/// Labels that the agent overwrites.
const DEFAULT_LABELS: [&str; 12] = [
    "kubernetes.io/hostname",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
    "node.kubernetes.io/instance-type",
    "beta.kubernetes.io/instance-type",
    "kubernetes.io/os",
    "kubernetes.io/arch",
    "node.kubernetes.io/windows-build",
    "beta.kubernetes.io/os",
    "beta.kubernetes.io/arch",
];

/// Computes the reconciled object; `ours` is the node that would have been created, with its status.
pub fn reconcile(existing: &api::Node, ours: &api::Node, devices_lost: bool) -> api::Node {
    let mut node = existing.clone();
    labels(&mut node, ours);
    attach_detach(&mut node, ours);
    if let (Some(status), Some(own)) = (&mut node.status, &ours.status) {
        pages(&mut status.capacity, own.capacity.as_ref());
        pages(&mut status.allocatable, own.allocatable.as_ref());
        if devices_lost {
            without_devices(&mut status.capacity);
            without_devices(&mut status.allocatable);
        }
    }
    node
}

fn labels(node: &mut api::Node, ours: &api::Node) {
    let own = ours.metadata.labels.clone().unwrap_or_default();
    let labels = node.metadata.labels.get_or_insert_default();
    for label in DEFAULT_LABELS {
        match own.get(label) {
            Some(value) if value.is_empty() => drop(labels.remove(label)),
            Some(value) => drop(labels.insert(label.to_owned(), value.clone())),
            None => {}
        }
    }
}

fn attach_detach(node: &mut api::Node, ours: &api::Node) {
    let own = ours.metadata.annotations.as_ref().and_then(|annotations| annotations.get(ATTACH_DETACH));
    match own {
        Some(value) => {
            node.metadata.annotations.get_or_insert_default().insert(ATTACH_DETACH.to_owned(), value.clone());
        }
        None => {
            if let Some(annotations) = &mut node.metadata.annotations {
                annotations.remove(ATTACH_DETACH);
            }
        }
    }
}

fn pages(list: &mut Option<Quantities>, own: Option<&Quantities>) {
    let Some(own) = own else { return };
    let list = list.get_or_insert_default();
    list.retain(|name, _| !is_hugepage(name) || own.contains_key(name));
    list.extend(
        own.iter().filter(|(name, _)| is_hugepage(name)).map(|(name, quantity)| (name.clone(), quantity.clone())),
    );
}

fn without_devices(list: &mut Option<Quantities>) {
    for (name, quantity) in list.iter_mut().flatten() {
        if is_extended(name) {
            *quantity = zero().into();
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn check(existing: Value, ours: Value, devices_lost: bool) -> Value {
        let read = |value| serde_json::from_value::<api::Node>(value).expect("a node");
        serde_json::to_value(reconcile(&read(existing), &read(ours), devices_lost)).expect("JSON")
    }

    #[test]
    fn default_labels_are_ours_and_all_else_stays() {
        // AC-05-23
        let existing = json!({
            "metadata": {"labels": {"kubernetes.io/hostname": "old", "x": "y", "topology.kubernetes.io/zone": "z",
                "node.kubernetes.io/instance-type": "m"}, "annotations": {ATTACH_DETACH: "true", "a": "b"}},
            "spec": {"taints": [{"key": "k", "effect": "NoSchedule"}]}, "status": {}});
        let ours = json!({
            "metadata": {"labels": {"kubernetes.io/hostname": "n", "own": "1", "node.kubernetes.io/instance-type": ""}},
            "spec": {"taints": [{"key": "ours", "effect": "NoExecute"}]}, "status": {}});
        let node = check(existing, ours, false);
        assert_eq!(
            node["metadata"]["labels"],
            json!({"kubernetes.io/hostname": "n", "topology.kubernetes.io/zone": "z", "x": "y"})
        );
        assert_eq!(node["metadata"]["annotations"], json!({"a": "b"}));
        assert_eq!(node["spec"]["taints"][0]["key"], "k");
        let ours = json!({"metadata": {"annotations": {ATTACH_DETACH: "true"}}, "status": {}});
        let node = check(json!({"metadata": {}, "status": {}}), ours, false);
        assert_eq!(node["metadata"]["annotations"][ATTACH_DETACH], "true");
    }

    #[test]
    fn huge_pages_follow_the_machine_and_lost_devices_are_zeroed() {
        let resources = json!({"cpu": "4", "hugepages-2Mi": "1Gi", "hugepages-1Gi": "0", "x.y/gpu": "2"});
        let existing = json!({"metadata": {}, "status": {"capacity": resources, "allocatable": resources}});
        let ours = json!({"metadata": {}, "status": {
            "capacity": {"cpu": "8", "hugepages-2Mi": "2Gi"}, "allocatable": {"hugepages-2Mi": "2Gi"}}});
        let expected = |gpu: &str| json!({"cpu": "4", "hugepages-2Mi": "2Gi", "x.y/gpu": gpu});
        for (lost, gpu) in [(false, "2"), (true, "0")] {
            let node = check(existing.clone(), ours.clone(), lost);
            assert_eq!(node["status"]["capacity"], expected(gpu));
            assert_eq!(node["status"]["allocatable"], expected(gpu));
        }
    }
}
