//! Pod manifests of the benchmarks.

use serde_json::{Value, json};

/// `hostnameOverride` of every agent in the benchmarks; the suffix of static pod names.
pub const NODE: &str = "bench";

/// A pod for the scripted runtime with that many containers, `c0`, `c1`, …
pub fn scripted(name: &str, containers: usize) -> Value {
    let containers: Vec<Value> = (0..containers).map(|i| container(&format!("c{i}"), &[])).collect();
    pod(name, json!({"containers": containers}))
}

/// A pod with that many init containers, `i0`, `i1`, …, before its only container `c0`.
pub fn with_init(name: &str, init: usize) -> Value {
    let init: Vec<Value> = (0..init).map(|i| container(&format!("i{i}"), &[])).collect();
    pod(name, json!({"initContainers": init, "containers": [container("c0", &[])]}))
}

/// A pod for a real runtime: busybox on the host network that sleeps until it receives SIGTERM.
pub fn real(name: &str) -> Value {
    pod(name, json!({"hostNetwork": true, "containers": [container("c0", &COMMAND)]}))
}

/// Exits on SIGTERM; process 1 of a PID namespace ignores the signal unless it installs a handler.
pub const COMMAND: [&str; 3] = ["sh", "-c", "trap 'exit 0' TERM; sleep 1000000 & wait"];

/// Full name of a static pod: name and node name.
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
