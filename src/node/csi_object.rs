//! CSINode object as JSON, edited in place so that fields of newer servers survive. Pure.
//!
//! Implements spec 07 §12.2.

use serde_json::{Value, json};

/// Annotation with the in-tree volume plugins that are migrated to CSI, read by controllers.
const MIGRATED: &str = "storage.alpha.kubernetes.io/migrated-plugins";
/// All migratable plugins, because none is in-tree any more. Sorted.
const PLUGINS: &str = "kubernetes.io/aws-ebs,kubernetes.io/azure-disk,kubernetes.io/azure-file,kubernetes.io/cinder,\
                       kubernetes.io/gce-pd,kubernetes.io/portworx-volume,kubernetes.io/vsphere-volume";

/// Action for an existing CSINode.
#[derive(Clone, PartialEq, Debug)]
pub enum CsiNodeAction {
    /// It is ours and up to date.
    Nothing,
    /// It is ours; write this object.
    Write(Value),
    /// It belongs to a deleted node; delete and create it.
    Replace,
}

/// Builds a CSINode without drivers.
pub fn created(node: &str, node_uid: &str) -> Value {
    json!({
        "apiVersion": "storage.k8s.io/v1",
        "kind": "CSINode",
        "metadata": {
            "name": node,
            "annotations": {MIGRATED: PLUGINS},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid}],
        },
        "spec": {"drivers": []},
    })
}

/// Decides what to do with `found` on the node of that UID.
pub fn due(mut found: Value, node_uid: &str) -> CsiNodeAction {
    let owner = found.pointer("/metadata/ownerReferences/0/uid").and_then(Value::as_str);
    if owner.is_some_and(|owner| owner != node_uid) {
        return CsiNodeAction::Replace;
    }
    let annotation = found.pointer("/metadata/annotations").and_then(|all| all.get(MIGRATED)).and_then(Value::as_str);
    if annotation == Some(PLUGINS) {
        return CsiNodeAction::Nothing;
    }
    let Some(metadata) = found.get_mut("metadata").and_then(Value::as_object_mut) else {
        return CsiNodeAction::Replace;
    };
    metadata.remove("managedFields");
    let annotations = metadata.entry("annotations").or_insert_with(|| json!({}));
    if let Some(annotations) = annotations.as_object_mut() {
        annotations.insert(MIGRATED.to_owned(), json!(PLUGINS));
    }
    CsiNodeAction::Write(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_kept_written_or_replaced() {
        let ours = created("n", "u");
        assert_eq!(due(ours.clone(), "u"), CsiNodeAction::Nothing);
        assert_eq!(due(ours, "other"), CsiNodeAction::Replace);
        // AC-10-39
        let found = json!({"metadata": {"name": "n", "resourceVersion": "3", "new": 1, "annotations": {"a": "b"}},
            "spec": {"drivers": [{"name": "d", "unknown": true}], "later": "x"}});
        let CsiNodeAction::Write(written) = due(found, "u") else { panic!("the annotation is missing") };
        assert_eq!(
            written,
            json!({"metadata": {"name": "n", "resourceVersion": "3", "new": 1,
                "annotations": {"a": "b", MIGRATED: PLUGINS}},
                "spec": {"drivers": [{"name": "d", "unknown": true}], "later": "x"}})
        );
        assert_eq!(due(json!([]), "u"), CsiNodeAction::Replace);
    }
}
