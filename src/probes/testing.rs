//! Test helpers of the probe modules.

use std::sync::Arc;

use berth_types::{Pod, api};

/// A pod with that spec.
pub fn pod(spec: serde_json::Value) -> Arc<Pod> {
    let object = serde_json::json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec});
    Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"))
}

/// A pod status.
pub fn status(value: serde_json::Value) -> api::PodStatus {
    serde_json::from_value(value).expect("a status")
}
