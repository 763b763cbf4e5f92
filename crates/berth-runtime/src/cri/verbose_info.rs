//! Verbose info of sandbox and container status, in the format of containerd. Pure.
//!
//! Users parse it with `crictl … | jq`, so the keys are containerd's. Implements spec 09a §2.1, §3.2.

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::{
    config::{NAME, PAUSE},
    container::Container,
    launch::{namespaces, oci},
    sandbox::Sandbox,
};
use berth_proto::cri::{self, NamespaceMode};
use berth_shim::plan::{LaunchPlan, PidNamespace, RootKind};

/// Info of a sandbox.
pub fn sandbox(sandbox: &Sandbox) -> Value {
    let pid = process(sandbox);
    json!({
        "pid": pid,
        "processStatus": if sandbox.is_ready() { "running" } else { "deleted" },
        "netNamespaceClosed": !sandbox.is_ready(),
        "image": PAUSE,
        "snapshotKey": sandbox.id(),
        "snapshotter": "",
        "runtimeHandler": sandbox.meta.runtime_handler,
        "runtimeType": NAME,
        "netns": sandbox.meta.netns,
        "cgroup": sandbox.meta.group,
        "config": shown(&*sandbox.config),
        "runtimeSpec": {
            "ociVersion": oci::VERSION,
            "hostname": sandbox.config.hostname,
            "annotations": sandbox.config.annotations,
            "linux": {"cgroupsPath": sandbox.meta.group, "namespaces": of_sandbox(sandbox, None)},
        },
        "cniResult": network(sandbox),
        "overhead": sandbox.overhead.as_ref().map(resources),
        "resources": sandbox.resources.as_ref().map(resources),
    })
}

/// Info of a container.
pub fn container(sandbox: &Sandbox, container: &Container) -> Value {
    let plan = &*container.plan;
    let mut spec = oci::spec(plan);
    spec["hostname"] = json!(sandbox.config.hostname);
    spec["annotations"] = json!(container.config.annotations);
    spec["linux"]["cgroupsPath"] = json!(container.meta.group);
    spec["linux"]["resources"] = container.resources.as_ref().map_or(Value::Null, resources);
    spec["linux"]["namespaces"] = Value::Array(of_container(sandbox, container));
    json!({
        "sandboxID": sandbox.id(),
        "pid": container.running().map(|started| started.pid).unwrap_or_default(),
        "removing": container.is_removing,
        "snapshotKey": container.id(),
        "snapshotter": snapshotter(plan),
        "runtimeType": NAME,
        "runtimeOptions": null,
        "config": shown(&*container.config),
        "runtimeSpec": spec,
    })
}

/// PID reported for the pod, which has no process of its own: that of the container that started first; 0: none runs.
fn process(sandbox: &Sandbox) -> u32 {
    let running = sandbox.containers.values().filter_map(|container| container.running().ok());
    running.min_by_key(|started| started.at_ns).map_or(0, |started| started.pid)
}

/// The pod's own namespaces; with a PID, `/proc` paths for those without a file.
fn of_sandbox(sandbox: &Sandbox, process: Option<u32>) -> Vec<Value> {
    let options = namespaces::options(&sandbox.config);
    let is_own = |mode: i32| mode != NamespaceMode::Node as i32;
    let at = |name: &str| process.map(|pid| format!("/proc/{pid}/ns/{name}"));
    let mut all = Vec::new();
    for (kind, is_own) in [("ipc", is_own(options.ipc)), ("uts", is_own(options.network))] {
        all.extend(is_own.then(|| namespace(kind, at(kind))));
    }
    if let Some(netns) = &sandbox.meta.netns {
        all.push(namespace("network", Some(netns.display().to_string())));
    }
    let has_users = namespaces::users(options.userns_options.as_ref()).is_ok_and(|users| users.is_some());
    all.extend(has_users.then(|| namespace("user", at("user"))));
    all
}

fn of_container(sandbox: &Sandbox, container: &Container) -> Vec<Value> {
    let process = container.running().ok().map(|started| started.pid);
    let pid = match &container.plan.processes {
        PidNamespace::Own => Some(namespace("pid", None)),
        PidNamespace::Pod | PidNamespace::Of(_) => {
            Some(namespace("pid", process.map(|pid| format!("/proc/{pid}/ns/pid"))))
        }
        PidNamespace::Host => None,
    };
    let mut all: Vec<Value> = pid.into_iter().collect();
    all.extend(of_sandbox(sandbox, process));
    all.push(namespace("mount", None));
    all.extend(container.plan.has_group_namespace.then(|| namespace("cgroup", None)));
    all
}

fn namespace(kind: &str, path: Option<String>) -> Value {
    match path {
        Some(path) => json!({"type": kind, "path": path}),
        None => json!({"type": kind}),
    }
}

/// The pod's addresses by interface, in the format of containerd's go-cni.
fn network(sandbox: &Sandbox) -> Value {
    let Some(netns) = &sandbox.meta.netns else { return Value::Null };
    let result = sandbox.meta.network.get("result").cloned().unwrap_or_default();
    let list = |name: &str| result[name].as_array().cloned().unwrap_or_default();
    let links = list("interfaces");
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let mut interfaces = Map::new();
    for link in &links {
        let is_pods = text(&link["sandbox"]).is_some_and(|sandbox| !sandbox.is_empty());
        if let Some(name) = text(&link["name"]).filter(|_| is_pods) {
            let one = json!({"IPConfigs": [], "Mac": link["mac"], "Sandbox": link["sandbox"]});
            interfaces.insert(name, one);
        }
    }
    let own = || json!({"IPConfigs": [], "Mac": "", "Sandbox": netns});
    for ip in list("ips") {
        let link = ip["interface"].as_u64().and_then(|index| links.get(usize::try_from(index).ok()?));
        let name = link.and_then(|link| text(&link["name"])).unwrap_or_else(|| "eth0".to_owned());
        let address = text(&ip["address"]).unwrap_or_default();
        let address = address.split('/').next().unwrap_or_default();
        let config = json!({"IP": address, "Gateway": ip["gateway"].as_str().unwrap_or_default()});
        add(interfaces.entry(name).or_insert_with(own), config);
    }
    if interfaces.is_empty() {
        let mut one = own();
        for ip in &sandbox.meta.ips {
            add(&mut one, json!({"IP": ip, "Gateway": ""}));
        }
        interfaces.insert("eth0".to_owned(), one);
    }
    json!({"Interfaces": interfaces, "DNS": [result["dns"]], "Routes": result["routes"]})
}

fn add(interface: &mut Value, config: Value) {
    if let Some(all) = interface["IPConfigs"].as_array_mut() {
        all.push(config);
    }
}

/// Resources as in an OCI runtime spec, with containerd's keys.
fn resources(linux_resources: &cri::LinuxContainerResources) -> Value {
    let memory = linux_resources.memory_limit_in_bytes;
    // A memory limit without a swap limit limits both together: there is no swap beyond it.
    let both = if linux_resources.memory_swap_limit_in_bytes == 0 {
        memory
    } else {
        linux_resources.memory_swap_limit_in_bytes
    };
    json!({
        "cpu": {
            "shares": linux_resources.cpu_shares, "quota": linux_resources.cpu_quota, "period": linux_resources.cpu_period,
            "cpus": linux_resources.cpuset_cpus, "mems": linux_resources.cpuset_mems,
        },
        "memory": {"limit": memory, "swap": both},
        "unified": linux_resources.unified,
    })
}

/// Name of the snapshotter that made the container's root.
fn snapshotter(plan: &LaunchPlan) -> &'static str {
    match plan.root.kind {
        RootKind::Overlay { .. } => "overlay",
        RootKind::Directory(_) => "copy",
    }
}

/// A request as JSON by field names; unset fields are omitted.
fn shown(request: &impl Serialize) -> Value {
    let mut value = serde_json::to_value(request).unwrap_or_default(); // messages always serialize
    leave_out(&mut value);
    value
}

fn leave_out(value: &mut Value) {
    match value {
        Value::Object(members) => {
            members.values_mut().for_each(leave_out);
            members.retain(|_, member| !is_nothing(member));
            members.sort_keys();
        }
        Value::Array(items) => items.iter_mut().for_each(leave_out),
        _ => {}
    }
}

fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(members) => members.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_shown_by_the_names_of_their_fields() {
        let request = cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata { name: "c".to_owned(), attempt: 0 }),
            mounts: vec![cri::Mount {
                container_path: "/a".to_owned(),
                host_path: "/b".to_owned(),
                ..Default::default()
            }],
            envs: vec![cri::KeyValue { key: "K".to_owned(), value: b"v".to_vec() }],
            annotations: [("b".to_owned(), "2".to_owned()), ("a".to_owned(), "1".to_owned())].into(),
            ..Default::default()
        };
        let expected = r#"{"annotations":{"a":"1","b":"2"},"envs":[{"key":"K","value":"v"}],"metadata":{"name":"c"},"mounts":[{"container_path":"/a","host_path":"/b"}]}"#;
        assert_eq!(shown(&request).to_string(), expected);
    }
}
