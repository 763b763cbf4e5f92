//! The CSINode as JSON, edited in place so that fields of newer servers survive. Pure. Spec 07 §12.2.

use serde_json::{Value, json};

/// Tells controllers which built-in volumes this node leaves to CSI drivers.
const MIGRATED: &str = "storage.alpha.kubernetes.io/migrated-plugins";
/// All of them: none is built in any more. Sorted.
const PLUGINS: &str = "kubernetes.io/aws-ebs,kubernetes.io/azure-disk,kubernetes.io/azure-file,kubernetes.io/cinder,\
                       kubernetes.io/gce-pd,kubernetes.io/portworx-volume,kubernetes.io/vsphere-volume";

/// What is due with a CSINode that is there.
#[derive(Clone, PartialEq, Debug)]
pub enum Due {
    /// It is ours and tells the truth.
    Nothing,
    /// It is ours, and should be this.
    Write(Value),
    /// It belongs to a node that is gone.
    Replace,
}

/// A CSINode without drivers.
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

/// What is due with `found` on the node of that UID.
pub fn due(mut found: Value, node_uid: &str) -> Due {
    let owner = found.pointer("/metadata/ownerReferences/0/uid").and_then(Value::as_str);
    if owner.is_some_and(|owner| owner != node_uid) {
        return Due::Replace;
    }
    let annotation = found.pointer("/metadata/annotations").and_then(|all| all.get(MIGRATED)).and_then(Value::as_str);
    if annotation == Some(PLUGINS) {
        return Due::Nothing;
    }
    let Some(metadata) = found.get_mut("metadata").and_then(Value::as_object_mut) else { return Due::Replace };
    metadata.remove("managedFields");
    let annotations = metadata.entry("annotations").or_insert_with(|| json!({}));
    if let Some(annotations) = annotations.as_object_mut() {
        annotations.insert(MIGRATED.to_owned(), json!(PLUGINS));
    }
    Due::Write(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_kept_written_or_replaced() {
        let ours = created("n", "u");
        assert_eq!(due(ours.clone(), "u"), Due::Nothing);
        assert_eq!(due(ours, "other"), Due::Replace);
        // AC-10-39
        let found = json!({"metadata": {"name": "n", "resourceVersion": "3", "new": 1, "annotations": {"a": "b"}},
            "spec": {"drivers": [{"name": "d", "unknown": true}], "later": "x"}});
        let Due::Write(written) = due(found, "u") else { panic!("the annotation is missing") };
        assert_eq!(
            written,
            json!({"metadata": {"name": "n", "resourceVersion": "3", "new": 1,
                "annotations": {"a": "b", MIGRATED: PLUGINS}},
                "spec": {"drivers": [{"name": "d", "unknown": true}], "later": "x"}})
        );
        assert_eq!(due(json!([]), "u"), Due::Replace);
    }
}
