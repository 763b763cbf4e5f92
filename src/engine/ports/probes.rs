//! The role of probes: what they last said.

use std::sync::Arc;

use crate::pod::{ContainerId, Pod, PodUid};

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
    /// What the probes of one container instance said.
    fn results(&self, container: &ContainerId) -> ProbeResults;
}
