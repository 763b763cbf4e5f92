//! Inputs of the pod status build: plain values collected by the pod worker. Pure.

use std::{collections::BTreeMap, net::IpAddr};

use jiff::Timestamp;

use berth_types::{ContainerId, Pod, api, observation::ObservedPod};

/// Kind of build (spec 02b §2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BuildKind {
    /// The pod runs or is terminating.
    Ongoing,
    /// All containers are stopped permanently.
    Terminal,
}

/// Reason why a container does not start; becomes `state.waiting`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StartFailure {
    /// `CrashLoopBackOff`, `ErrImagePull`, `RunContainerError`, …
    pub reason: String,
    /// Message for people.
    pub message: String,
}

/// Reason and message that force the phase `Failed` (active deadline, eviction).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Eviction {
    /// `status.reason`.
    pub reason: String,
    /// `status.message`.
    pub message: String,
}

/// Probe results of a container instance; `None` where there is no result (yet).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ProbeOutcome {
    /// Whether the startup probe succeeded.
    pub startup: Option<bool>,
    /// Whether the readiness probe succeeded.
    pub readiness: Option<bool>,
}

/// CPU and memory of a pod's cgroup; `None` where not read or not limited.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PodCgroup {
    /// CPU request in milli-CPU (from the weight).
    pub cpu_request_milli: Option<i64>,
    /// CPU limit in milli-CPU (from quota and period).
    pub cpu_limit_milli: Option<i64>,
    /// Memory limit in bytes; `None` if unlimited or not read.
    pub memory_limit_bytes: Option<i64>,
}

/// Facts about the node, the same for all pods.
#[derive(Clone, Copy, Debug)]
pub struct NodeFacts<'a> {
    /// Name of the runtime: the scheme of container IDs.
    pub runtime_name: &'a str,
    /// Node addresses: internal, then external ones; empty while unknown.
    pub host_ips: &'a [IpAddr],
    /// Whether the first node address is IPv6; pod addresses then start with IPv6.
    pub prefer_v6: bool,
    /// Whether there is an API server; without one no node addresses are written.
    pub api_client: bool,
    /// Start time of this agent: containers that are older keep their readiness.
    pub agent_started: Timestamp,
}

/// Inputs of a status build.
pub struct StatusInput<'a> {
    /// The pod, with allocated resources and the last status from the API server.
    pub pod: &'a Pod,
    /// Observation of the container runtime.
    pub observed: &'a ObservedPod,
    /// The last accepted status; `None` before the first one.
    pub previous: Option<&'a api::PodStatus>,
    /// Kind of build.
    pub kind: BuildKind,
    /// Last start failure by container name.
    pub start_failures: &'a BTreeMap<String, StartFailure>,
    /// Returns the probe results of a container instance.
    pub probes: &'a dyn Fn(&ContainerId) -> ProbeOutcome,
    /// Returns the health of a container's devices.
    pub devices: &'a dyn Fn(&str) -> Vec<api::ResourceStatus>,
    /// Eviction of the pod, if any; the first handler wins.
    pub eviction: Option<&'a Eviction>,
    /// `PodResizePending` and `PodResizeInProgress`, where set; the terminal build ignores them.
    pub resize: &'a [api::PodCondition],
    /// Values of the pod's cgroup, where it was read.
    pub cgroup: Option<PodCgroup>,
    /// Whether the runtime handler supports recursive read-only mounts.
    pub recursive_read_only: bool,
    /// Whether sandbox, network, and volumes have just become ready, which the observation cannot contain yet.
    pub sandbox_ready: bool,
    /// Facts about the node.
    pub node: NodeFacts<'a>,
}
