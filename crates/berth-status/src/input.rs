//! What a status is built from: plain values that the worker gathers. Pure.

use std::{collections::BTreeMap, net::IpAddr};

use jiff::Timestamp;

use berth_types::{ContainerId, Pod, api, observed::ObservedPod};

/// Which of the two builds this is (spec 02b §2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Build {
    /// The pod runs, or is being stopped.
    Ongoing,
    /// All containers have been stopped for good.
    Terminal,
}

/// Why a container does not start: becomes `state.waiting`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StartFailure {
    /// `CrashLoopBackOff`, `ErrImagePull`, `RunContainerError`, …
    pub reason: String,
    /// The message.
    pub message: String,
}

/// Reason and message that a phase `Failed` is forced with (active deadline, eviction).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Eviction {
    /// `status.reason`.
    pub reason: String,
    /// `status.message`.
    pub message: String,
}

/// What the probes of one container instance said; `None` where there is no result (yet).
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
    /// Memory limit in bytes.
    pub memory_limit_bytes: Option<i64>,
}

/// What is the same for all pods of the node.
#[derive(Clone, Copy, Debug)]
pub struct NodeFacts<'a> {
    /// How the runtime calls itself: the scheme of container ids.
    pub runtime_name: &'a str,
    /// The node's addresses: internal ones, then external ones; empty while unknown.
    pub host_ips: &'a [IpAddr],
    /// Whether the node's first address is IPv6: IPv6 comes first then.
    pub prefer_v6: bool,
    /// Whether there is an API server; without one no node address is written.
    pub api_client: bool,
    /// When this agent started: containers older than that carry their readiness over.
    pub agent_started: Timestamp,
}

/// Everything one build looks at.
pub struct StatusInput<'a> {
    /// The pod, with allocated resources and the API's last status.
    pub pod: &'a Pod,
    /// What the runtime showed.
    pub observed: &'a ObservedPod,
    /// The status accepted last; `None` before the first one.
    pub previous: Option<&'a api::PodStatus>,
    /// Which build.
    pub kind: Build,
    /// Last failure to start, by container name.
    pub start_failures: &'a BTreeMap<String, StartFailure>,
    /// What the probes said of a container instance.
    pub probes: &'a dyn Fn(&ContainerId) -> ProbeOutcome,
    /// Set where something evicts the pod; the first handler's word.
    pub eviction: Option<&'a Eviction>,
    /// `PodResizePending` and `PodResizeInProgress`, where set; ignored by the terminal build.
    pub resize: &'a [api::PodCondition],
    /// The pod's cgroup, where it was read.
    pub cgroup: Option<PodCgroup>,
    /// Whether the runtime handler can mount recursively read-only.
    pub recursive_read_only: bool,
    /// Sandbox, network and volumes have just become ready, which the observation cannot show yet.
    pub sandbox_ready: bool,
    /// The node.
    pub node: NodeFacts<'a>,
}
