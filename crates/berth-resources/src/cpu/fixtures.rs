//! CPU sets, states, and pods for tests of the CPU manager. Pure.

use berth_types::{CpuSet, Pod};
use serde_json::{Value, json};

use super::state::CpuState;

/// Owners and their CPU lists: `pod/container` or `pod`.
pub type Entries<'a> = &'a [(&'a str, &'a str)];

/// Containers written as `name=cpu`, sidecars as `name*=cpu`; `name` or `name*` without resources.
pub type Containers<'a> = &'a [&'a str];

/// A CPU set from its list.
pub fn cpus(text: &str) -> CpuSet {
    CpuSet::parse(text).expect(text)
}

/// A state with this shared pool.
pub fn state(default: &str, entries: Entries<'_>) -> CpuState {
    let mut state = CpuState { default: cpus(default), ..CpuState::default() };
    for (owner, list) in entries {
        match owner.split_once('/') {
            Some((pod, container)) => {
                state.assignments.entry(pod.into()).or_default().insert(container.to_owned(), cpus(list));
            }
            None => drop(state.pod_entries.insert((*owner).into(), cpus(list))),
        }
    }
    state
}

/// A Guaranteed pod.
pub fn pod(uid: &str, init: Containers<'_>, regular: Containers<'_>) -> Pod {
    let list = |containers: Containers<'_>| containers.iter().copied().map(container).collect::<Vec<Value>>();
    pod_of(uid, json!({ "initContainers": list(init), "containers": list(regular) }))
}

/// A Guaranteed pod with pod-level resources.
pub fn pod_level(uid: &str, cpu: &str, init: Containers<'_>, regular: Containers<'_>) -> Pod {
    let list = |containers: Containers<'_>| containers.iter().copied().map(container).collect::<Vec<Value>>();
    let amounts = json!({ "cpu": cpu, "memory": "1Gi" });
    let resources = json!({ "requests": amounts, "limits": amounts });
    pod_of(uid, json!({ "initContainers": list(init), "containers": list(regular), "resources": resources }))
}

/// A pod with this spec.
pub fn pod_of(uid: &str, spec: Value) -> Pod {
    let object = json!({ "metadata": { "name": uid, "namespace": "n", "uid": uid }, "spec": spec });
    Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
}

fn container(text: &str) -> Value {
    let (name, cpu) = text.split_once('=').map_or((text, None), |(name, cpu)| (name, Some(cpu)));
    let mut container = json!({});
    if let Some(cpu) = cpu {
        let amounts = json!({ "cpu": cpu, "memory": "1Mi" });
        container["resources"] = json!({ "requests": amounts, "limits": amounts });
    }
    if let Some(sidecar) = name.strip_suffix('*') {
        container["name"] = json!(sidecar);
        container["restartPolicy"] = json!("Always");
    } else {
        container["name"] = json!(name);
    }
    container
}
