//! Ports of the prober: probe results for the status, and pod status for the probes.

use std::sync::Arc;

use berth_types::{ContainerId, Pod, PodUid, api};

/// Result of a probe after applying its thresholds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProbeResult {
    /// Passed (or counts as passed).
    Success,
    /// Failed `failureThreshold` times.
    Failure,
}

/// Probe results of one container instance; `None` if there is no result (yet).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ProbeResults {
    /// Startup probe.
    pub startup: Option<ProbeResult>,
    /// Readiness probe.
    pub readiness: Option<ProbeResult>,
    /// Liveness probe.
    pub liveness: Option<ProbeResult>,
}

/// Runs probes and caches their results.
pub trait ProbeManager: Send + Sync + 'static {
    /// Starts the probes of a pod. Idempotent.
    fn add(&self, pod: &Arc<Pod>);
    /// Stops liveness and startup probes; readiness probes continue (termination has begun).
    fn stop_liveness(&self, pod: &PodUid);
    /// Stops all probes of a pod and drops their results.
    fn remove(&self, pod: &PodUid);
    /// Runs a container's readiness probe immediately instead of at its next period, and its startup probe if that has
    /// not run on this instance: the container runs, and has not started or is not ready.
    fn trigger(&self, pod: &PodUid, container: &str);
    /// Probe results of one container instance.
    fn results(&self, container: &ContainerId) -> ProbeResults;
}

/// Latest status of a pod, as probes read it.
#[derive(Clone, Debug)]
pub struct ProbedStatus {
    /// Pod status.
    pub status: Arc<api::PodStatus>,
    /// Whether all containers of the pod are being restarted.
    pub restart_all: bool,
}

/// Pod status that probes read and update. Never blocks.
pub trait ProbedPods: Send + Sync + 'static {
    /// Latest status of the pod; `None` before its first one.
    fn status(&self, pod: &PodUid) -> Option<ProbedStatus>;
    /// Change counter: differs after each change of any pod's [`status`](Self::status); read it before the status.
    fn changes(&self) -> u64;
    /// Sets the readiness of a container instance in the pod's status immediately.
    fn set_ready(&self, pod: &Pod, container: &ContainerId, ready: bool);
    /// Sets the `started` field of a container instance in the pod's status immediately.
    fn set_started(&self, pod: &Pod, container: &ContainerId, started: bool);
    /// Schedules another sync of the pod's worker.
    fn wake(&self, pod: &PodUid);
}
