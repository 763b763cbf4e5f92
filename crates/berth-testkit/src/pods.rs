//! Builders of test pods.

use std::sync::Arc;

use berth_types::Pod;
use serde_json::{Value, json};

/// Pod `name` in `default` with UID `uid-<name>`, source `file`, and that spec; containers without image or pull
/// policy get defaults.
pub fn pod(name: &str, spec: Value) -> Arc<Pod> {
    pod_with(name, json!({}), spec)
}

/// Like [`pod`], with additional metadata fields.
pub fn pod_with(name: &str, metadata: Value, mut spec: Value) -> Arc<Pod> {
    for list in ["containers", "initContainers"] {
        for container in spec.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            let fields = container.as_object_mut().expect("container is not a JSON object");
            fields.entry("image").or_insert("busybox:1".into());
            fields.entry("imagePullPolicy").or_insert("IfNotPresent".into());
            fields.entry("terminationMessagePath").or_insert("/dev/termination-log".into());
            fields.entry("terminationMessagePolicy").or_insert("File".into());
        }
    }
    let fields = spec.as_object_mut().expect("spec is not a JSON object");
    fields.entry("restartPolicy").or_insert("Always".into());
    fields.entry("dnsPolicy").or_insert("Default".into());
    fields.entry("enableServiceLinks").or_insert(true.into());
    fields.entry("terminationGracePeriodSeconds").or_insert(30.into());
    fields.entry("securityContext").or_insert(json!({}));
    let mut meta = json!({
        "name": name, "namespace": "default", "uid": format!("uid-{name}"),
        "annotations": {"kubernetes.io/config.source": "file", "kubernetes.io/config.hash": format!("uid-{name}")},
    });
    for (key, value) in metadata.as_object().expect("metadata is not a JSON object") {
        meta[key] = value.clone();
    }
    let object = json!({"metadata": meta, "spec": spec, "status": {"phase": "Pending"}});
    Arc::new(Pod::new(serde_json::from_value(object).expect("invalid pod")).expect("complete"))
}

/// Pod with one container `main`.
pub fn simple(name: &str) -> Arc<Pod> {
    pod(name, json!({"containers": [{"name": "main"}]}))
}
