//! The role of probes: what they last said; and what probes need of the rest.

use std::sync::Arc;

use berth_types::{ContainerId, Pod, PodUid, api};

/// What a probe said.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProbeResult {
    /// Passed (or counted as passed).
    Success,
    /// Failed as often as its threshold says.
    Failure,
}

/// Results for one container instance; `None` where there is no result (yet).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ProbeResults {
    /// Startup probe.
    pub startup: Option<ProbeResult>,
    /// Readiness probe.
    pub readiness: Option<ProbeResult>,
    /// Liveness probe.
    pub liveness: Option<ProbeResult>,
}

/// Runs probes and remembers what they said.
pub trait ProbeManager: Send + Sync + 'static {
    /// Starts the probes of a pod. Idempotent.
    fn add(&self, pod: &Arc<Pod>);
    /// Stops liveness and startup probes; readiness goes on (termination has begun).
    fn stop_liveness(&self, pod: &PodUid);
    /// Stops all probes of a pod and forgets their results.
    fn remove(&self, pod: &PodUid);
    /// Runs a container's readiness probe at once, not only at its next moment, and its startup probe where that has
    /// not run on this instance: the container runs, and has not started or is not ready.
    fn trigger(&self, pod: &PodUid, container: &str);
    /// What the probes of one container instance said.
    fn results(&self, container: &ContainerId) -> ProbeResults;
}

/// A pod's latest status, as probes read it.
#[derive(Clone, Debug)]
pub struct ProbedStatus {
    /// The status.
    pub status: Arc<api::PodStatus>,
    /// Whether all its containers are being restarted.
    pub restart_all: bool,
}

/// Where probes read how a pod stands, and tell what they learnt. Never blocks.
pub trait ProbedPods: Send + Sync + 'static {
    /// The pod's latest status; `None` before its first one.
    fn status(&self, pod: &PodUid) -> Option<ProbedStatus>;
    /// A number that is another one after each change of what [`status`](Self::status) says of any pod; to be asked
    /// first.
    fn changes(&self) -> u64;
    /// Says at once in the pod's status that an instance is ready, or not.
    fn set_ready(&self, pod: &Pod, container: &ContainerId, ready: bool);
    /// Says at once in the pod's status that an instance has started, or not.
    fn set_started(&self, pod: &Pod, container: &ContainerId, started: bool);
    /// Lets the pod's worker take another turn.
    fn wake(&self, pod: &PodUid);
}
