//! Test fixtures: pods, statuses, and observations for table-driven tests.

use std::{collections::BTreeMap, net::IpAddr};

use jiff::Timestamp;
use serde_json::{Value, json};

use super::{BuildKind, Eviction, NodeFacts, ProbeOutcome, StartFailure, StatusInput, build};
use berth_types::{
    ContainerId, Pod, SandboxId, api,
    observation::{
        ContainerState, Generation, NetworkMode, ObservedContainer, ObservedPod, ObservedSandbox, SandboxState,
    },
};

/// Start time of the agent in these tests, in Unix seconds.
pub const AGENT_STARTED: i64 = 1_000_000;

/// Timestamp from Unix seconds.
pub fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(seconds).expect("a small number")
}

/// Pod with this specification, and a generation.
pub fn pod_with(spec: Value) -> Pod {
    let metadata = json!({"name": "p", "namespace": "n", "uid": "u", "generation": 3});
    Pod::new(serde_json::from_value(json!({"metadata": metadata, "spec": spec})).expect("a pod")).expect("complete")
}

/// Container names beginning with `i` are init containers, with `s` sidecars, all others regular.
fn spec(policy: &str, names: &[&str]) -> Value {
    let mut init = Vec::new();
    let mut regular = Vec::new();
    for name in names {
        let mut container = json!({"name": name, "image": format!("img:{name}")});
        if name.starts_with('s') {
            container["restartPolicy"] = "Always".into();
        }
        if name.starts_with(['i', 's']) { init.push(container) } else { regular.push(container) }
    }
    json!({"restartPolicy": policy, "initContainers": init, "containers": regular})
}

/// Pod from the API server.
pub fn pod(policy: &str, names: &[&str]) -> Pod {
    pod_with(spec(policy, names))
}

/// Static pod from a file.
pub fn static_pod(policy: &str, names: &[&str]) -> Pod {
    let metadata = json!({"name": "p", "namespace": "n", "uid": "u",
        "annotations": {"kubernetes.io/config.source": "file"}});
    let object = json!({"metadata": metadata, "spec": spec(policy, names)});
    Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
}

/// Replaces the API status of a pod.
pub fn set_status(pod: &mut Pod, status: Value) {
    let mut object = pod.to_object();
    object.status = Some(serde_json::from_value(status).expect("a status"));
    *pod = Pod::new(object).expect("complete");
}

/// Container status with this state, which may include `lastState`.
pub fn status(name: &str, state: Value) -> api::ContainerStatus {
    let mut state = state;
    let last = state.as_object_mut().and_then(|s| s.remove("lastState")).unwrap_or_else(|| json!({}));
    serde_json::from_value(json!({
        "name": name, "image": "img", "imageID": "", "ready": false, "restartCount": 0, "state": state, "lastState": last,
    }))
    .expect("a status")
}

/// `running`.
pub fn running() -> Value {
    json!({"running": {}})
}

/// `waiting`, before the first start.
pub fn waiting() -> Value {
    json!({"waiting": {}})
}

/// `terminated`.
pub fn exited(code: i32) -> Value {
    json!({"terminated": {"exitCode": code}})
}

/// `waiting` after an exit.
pub fn waiting_after(code: i32) -> Value {
    json!({"waiting": {}, "lastState": {"terminated": {"exitCode": code}}})
}

/// State of a container in the runtime.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RuntimeState {
    /// Created, never started: without a start time.
    Created,
    /// Running since one second after its creation.
    Running,
    /// Exited with that code.
    Exited(i32),
    /// Unknown to the runtime.
    Unknown,
}

/// The `number`-th instance of a container, in the sandbox `box`.
pub fn instance(name: &str, number: i32, seen: RuntimeState) -> ObservedContainer {
    let created = AGENT_STARTED + i64::from(number) * 60;
    let (state, exit_code) = match seen {
        RuntimeState::Created => (ContainerState::Created, 0),
        RuntimeState::Running => (ContainerState::Running, 0),
        RuntimeState::Exited(code) => (ContainerState::Exited, code),
        RuntimeState::Unknown => (ContainerState::Unknown, 0),
    };
    let exited = state == ContainerState::Exited;
    ObservedContainer {
        id: ContainerId::from(format!("{name}-{number}")),
        name: name.into(),
        sandbox: SandboxId::from("box"),
        state,
        created_at: at(created),
        started_at: (state != ContainerState::Created).then(|| at(created + 1)),
        finished_at: exited.then(|| at(created + 2)),
        exit_code,
        reason: if exited { "Error".to_owned() } else { String::new() },
        message: String::new(),
        image: format!("img:{name}"),
        image_ref: format!("ref:{name}"),
        image_id: format!("id:{name}"),
        hash: None,
        restart_count: number,
        log_path: String::new(),
        resources: None,
        user: None,
    }
}

/// Sandbox with these addresses.
pub fn sandbox(id: &str, state: SandboxState, ips: &[&str]) -> ObservedSandbox {
    ObservedSandbox {
        id: SandboxId::from(id),
        attempt: 0,
        state,
        created_at: at(AGENT_STARTED),
        network_mode: NetworkMode::Pod,
        has_network: true,
        ips: ips.iter().map(|ip| ip.parse::<IpAddr>().expect("an address")).collect(),
        runtime_handler: String::new(),
    }
}

/// Observation with one instance of each container, in a ready sandbox if there are any.
pub fn observed(seen: &[(&str, RuntimeState)]) -> ObservedPod {
    let id = pod("Always", &[]).id().clone();
    let mut observed = ObservedPod::empty(id, Generation(1), at(AGENT_STARTED));
    observed.containers = seen.iter().map(|(name, seen)| instance(name, 0, *seen)).collect();
    if !seen.is_empty() {
        observed.sandboxes = vec![sandbox("box", SandboxState::Ready, &["10.0.0.1"])];
    }
    observed.sort();
    observed
}

/// Returns the health of a container's devices.
type DeviceHealth = dyn Fn(&str) -> Vec<api::ResourceStatus>;

/// Owned inputs of a build.
pub struct StatusFixture {
    pub pod: Pod,
    pub observed: ObservedPod,
    pub previous: Option<api::PodStatus>,
    pub kind: BuildKind,
    pub failures: BTreeMap<String, StartFailure>,
    pub eviction: Option<Eviction>,
    pub resize: Vec<api::PodCondition>,
    pub recursive: bool,
    pub prefer_v6: bool,
    probes: Box<dyn Fn(&ContainerId) -> ProbeOutcome>,
    /// Health of the devices by container name.
    pub devices: Box<DeviceHealth>,
}

impl StatusFixture {
    /// Inputs with default values.
    pub fn new(pod: Pod, observed: ObservedPod) -> Self {
        Self {
            pod,
            observed,
            previous: None,
            kind: BuildKind::Ongoing,
            failures: BTreeMap::new(),
            eviction: None,
            resize: Vec::new(),
            recursive: false,
            prefer_v6: false,
            probes: Box::new(|_| ProbeOutcome::default()),
            devices: Box::new(|_| Vec::new()),
        }
    }

    /// Sets the probe results of every container.
    pub fn set_probes(&mut self, outcome: ProbeOutcome) {
        self.probes = Box::new(move |_| outcome);
    }

    /// Requests the deletion of the pod.
    pub fn delete(&mut self) {
        let mut object = self.pod.to_object();
        object.metadata.deletion_timestamp = Some(at(AGENT_STARTED).into());
        self.pod = Pod::new(object).expect("complete");
    }

    /// Sets the status of the API server.
    pub fn set_api_status(&mut self, status: Value) {
        set_status(&mut self.pod, status);
    }

    /// Inputs of a build.
    pub fn input(&self) -> StatusInput<'_> {
        StatusInput {
            pod: &self.pod,
            observed: &self.observed,
            previous: self.previous.as_ref(),
            kind: self.kind,
            start_failures: &self.failures,
            probes: &*self.probes,
            devices: &*self.devices,
            eviction: self.eviction.as_ref(),
            resize: &self.resize,
            cgroup: None,
            recursive_read_only: self.recursive,
            sandbox_ready: false,
            node: NodeFacts {
                runtime_name: "containerd",
                host_ips: &[],
                prefer_v6: self.prefer_v6,
                api_client: false,
                agent_started: at(AGENT_STARTED),
            },
        }
    }

    /// Builds the status.
    pub fn build(&self) -> api::PodStatus {
        build(&self.input())
    }
}
