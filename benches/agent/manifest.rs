//! Manifests of the pods that are measured.

use serde_json::{Value, json};

/// `hostnameOverride` of every agent here; static pods get it as a suffix.
pub const NODE: &str = "bench";

/// A pod for the scripted runtime with that many containers, `c0`, `c1`, …
pub fn scripted(name: &str, containers: usize) -> Value {
    let containers: Vec<Value> = (0..containers).map(|i| container(&format!("c{i}"), &[])).collect();
    pod(name, json!({"containers": containers}))
}

/// A pod with so many init containers, `i0`, `i1`, …, before its only container `c0`.
pub fn with_init(name: &str, init: usize) -> Value {
    let init: Vec<Value> = (0..init).map(|i| container(&format!("i{i}"), &[])).collect();
    pod(name, json!({"initContainers": init, "containers": [container("c0", &[])]}))
}

/// A pod for a real runtime: busybox on the host's network that waits for ever and ends at once
/// when told so.
pub fn real(name: &str) -> Value {
    pod(name, json!({"hostNetwork": true, "containers": [container("c0", &COMMAND)]}))
}

/// Ends with SIGTERM, as the first process of a container does only where it asks for it.
pub const COMMAND: [&str; 3] = ["sh", "-c", "trap 'exit 0' TERM; sleep 1000000 & wait"];

/// The pod's name in the runtime.
pub fn full_name(name: &str) -> String {
    format!("{name}-{NODE}")
}

fn container(name: &str, command: &[&str]) -> Value {
    let mut container =
        json!({"name": name, "image": "docker.io/library/busybox:1", "imagePullPolicy": "IfNotPresent"});
    if !command.is_empty() {
        container["command"] = json!(command);
    }
    container
}

fn pod(name: &str, spec: Value) -> Value {
    let mut spec = spec;
    spec["terminationGracePeriodSeconds"] = json!(1);
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"}, "spec": spec})
}
