//! State of one probe, kept by the probe scheduler.

use std::{sync::Arc, time::Duration};

use tokio::{task::AbortHandle, time::Instant};
use tracing::{debug, info};

use super::{
    history::Runs,
    kind::{DeclaredProbe, Handler, ProbeKind, ProbeTiming},
    outcome::Outcome,
    pod_observation::PodObservation,
    request::ProbeRequest,
    scheduler::ProbeDeps,
    state_machine::{ProbeProperties, ProbeStateMachine},
};
use berth_metrics::{ProbeCounter, ProbeTimeliness, ProbedContainer};
use berth_ports::ProbeResult;
use berth_types::{ContainerKind, Pod, api};

/// Minimum interval between triggered attempts.
const BETWEEN_ASKED: Duration = Duration::from_secs(1);

/// One probe.
pub struct Probe {
    /// Counter of its results.
    pub counter: ProbeCounter,
    /// Metrics of the delay of its attempts.
    pub pace: ProbeTimeliness,
    /// Pod of the probe.
    pub pod: Arc<Pod>,
    /// Name of the container.
    pub container: Arc<str>,
    /// Kind of that container.
    pub place: ContainerKind,
    /// State machine of the probe.
    pub turn: ProbeStateMachine,
    /// Reference instant: attempts are due then and at whole periods after it.
    pub base: Instant,
    /// Time of the scheduled attempt.
    pub next_attempt_at: Option<Instant>,
    /// Last observation of its container.
    pub last_observation: Option<CachedObservation>,
    /// Last published result of its instance.
    pub last_published: Option<ProbeResult>,
    /// History of its instance, after the first attempt.
    pub runs: Option<Runs>,
    /// Attempt in flight.
    pub attempt: Option<AbortHandle>,
    /// Time of the retry after a failure that did not count.
    pub retry_at: Option<Instant>,
    /// An attempt has been triggered.
    pub is_triggered: bool,
    /// Time of the last triggered attempt.
    pub triggered_at: Option<Instant>,
}

/// Observation of a probe's container. It stays valid while the change counter is the same: there are hundreds of
/// attempts a minute for pods that did not change.
pub struct CachedObservation {
    /// Change counter of pods at the time of the observation.
    pub changes: u64,
    /// The observation, and the pod's address; `None` if the pod had no status.
    pub found: Option<(PodObservation, Option<String>)>,
    /// Request for that observation, once it was built.
    pub ask: Option<Arc<ProbeRequest>>,
}

impl Probe {
    /// Creates the probe that the pod declares, before its first attempt.
    pub fn new(pod: &Arc<Pod>, one: &DeclaredProbe<'_>, base: Instant, deps: &ProbeDeps) -> Self {
        let (id, container) = (pod.id(), one.container.name.as_str());
        let labels = ProbedContainer { container, pod: &id.name, namespace: &id.namespace, uid: id.uid.as_str() };
        let turn = ProbeStateMachine::new(ProbeProperties {
            kind: one.kind,
            pace: ProbeTiming::of(one.probe),
            is_sidecar: Pod::is_sidecar(one.container),
            agent_started: deps.started_at,
        });
        Self {
            counter: deps.metrics.begin(one.kind.label(), &labels),
            pace: deps.paces.of(one.kind.label(), Handler::of(one.probe).label()),
            pod: pod.clone(),
            container: container.into(),
            place: one.container_kind,
            turn,
            base,
            next_attempt_at: None,
            last_observation: None,
            last_published: None,
            runs: None,
            attempt: None,
            retry_at: None,
            is_triggered: false,
            triggered_at: None,
        }
    }

    /// Kind of the probe.
    pub fn kind(&self) -> ProbeKind {
        self.turn.fixed().kind
    }

    /// The probe as `pod` declares it.
    pub fn declared<'a>(&self, pod: &'a Pod) -> Option<DeclaredProbe<'a>> {
        let (place, container) = pod.container(&self.container)?;
        Some(DeclaredProbe { container, container_kind: place, kind: self.kind(), probe: self.kind().of(container)? })
    }

    /// Time of the next attempt: the next regular one, or sooner for a retry or a triggered one.
    pub fn next_attempt(&self, now: Instant) -> Instant {
        let period = self.turn.fixed().pace.period;
        let passed = now.saturating_duration_since(self.base);
        let regular = if now < self.base {
            self.base
        } else {
            let into = Duration::from_nanos((passed.as_nanos() % period.as_nanos().max(1)).try_into().unwrap_or(0));
            now + period.saturating_sub(into)
        };
        let regular = self.retry_at.map_or(regular, |at| at.max(now).min(regular));
        if !self.is_triggered {
            return regular;
        }
        let soonest = self.triggered_at.map_or(now, |at| (at + BETWEEN_ASKED).max(now));
        soonest.min(regular)
    }

    /// Logs the outcome of an attempt, with kubelet's verbosity levels.
    pub fn log(&self, outcome: &Outcome) {
        let (kind, pod, container) = (self.kind().label(), &*self.pod, &*self.container);
        match outcome {
            Outcome::Success | Outcome::Warning(_) => debug!(
                v = 3, probeType = kind, pod = %pod.object_name(), podUID = %pod.uid(), containerName = container,
                "Probe succeeded"
            ),
            Outcome::Failure(output) => info!(
                v = 1, probeType = kind, pod = %pod.object_name(), podUID = %pod.uid(), containerName = container,
                probeResult = "failure", output, "Probe failed"
            ),
            Outcome::Error { state, text } => info!(
                v = 1, probeType = kind, pod = %pod.object_name(), podUID = %pod.uid(), containerName = container,
                probeResult = state.as_str(), err = text, "Probe errored"
            ),
        }
    }
}

/// Address of a pod for probes. A host-network pod without an address is probed on 127.0.0.1.
pub fn address(pod: &Pod, status: &api::PodStatus) -> Option<String> {
    let pod_ip = status.pod_ip.clone().filter(|ip| !ip.is_empty());
    pod_ip.or_else(|| pod.is_host_network().then(|| "127.0.0.1".to_owned()))
}
