//! What the tests of this room share.

use std::sync::Arc;

use berth_types::{Pod, api};

/// A pod of that specification.
pub fn pod(spec: serde_json::Value) -> Arc<Pod> {
    let object = serde_json::json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec});
    Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"))
}

/// A status.
pub fn status(value: serde_json::Value) -> api::PodStatus {
    serde_json::from_value(value).expect("a status")
}
