//! One probe, as the task of all of them keeps it.

use std::{sync::Arc, time::Duration};

use tokio::{task::AbortHandle, time::Instant};
use tracing::{debug, info};

use super::{
    ask::Ask,
    history::Runs,
    kind::{Declared, Handler, Kind, Pace},
    outcome::Outcome,
    owner::Deps,
    seen::Seen,
    turn::{Fixed, Turn},
};
use berth_metrics::{ProbeCounter, ProbePace, ProbedContainer};
use berth_ports::ProbeResult;
use berth_types::{ContainerKind, Pod, api};

/// What is asked for out of turn is asked for at most so often.
const BETWEEN_ASKED: Duration = Duration::from_secs(1);

/// One probe.
pub struct Probe {
    /// Counts it.
    pub counter: ProbeCounter,
    /// Shows whether it is asked in time.
    pub pace: ProbePace,
    /// Whose it is.
    pub pod: Arc<Pod>,
    /// Of which container.
    pub container: Arc<str>,
    /// Where that stands.
    pub place: ContainerKind,
    /// What it does next.
    pub turn: Turn,
    /// Its moments are this one and whole periods after it.
    pub base: Instant,
    /// Its next moment.
    pub moment: Option<Instant>,
    /// How its container stood when that was looked at last.
    pub look: Option<Look>,
    /// What was told of its instance last.
    pub told: Option<ProbeResult>,
    /// What its attempts on that came to, once there were some.
    pub runs: Option<Runs>,
    /// The attempt in flight.
    pub attempt: Option<AbortHandle>,
    /// When it is tried again after a failure that did not count.
    pub retry_at: Option<Instant>,
    /// It is asked for out of turn.
    pub is_asked: bool,
    /// When it was, last.
    pub asked_at: Option<Instant>,
}

/// How a probe's container stood. It still does while there are no other changes: hundreds of probes a minute ask of
/// pods of which there is nothing new.
pub struct Look {
    /// So many changes of pods there had been.
    pub changes: u64,
    /// How it stood, and its pod's address; `None` where the pod had no status.
    pub found: Option<(Seen, Option<String>)>,
    /// What is asked of it then, once it was.
    pub ask: Option<Arc<Ask>>,
}

impl Probe {
    /// The probe that the pod declares, before its first moment.
    pub fn new(pod: &Arc<Pod>, one: &Declared<'_>, base: Instant, deps: &Deps) -> Self {
        let (id, container) = (pod.id(), one.container.name.as_str());
        let labels = ProbedContainer { container, pod: &id.name, namespace: &id.namespace, uid: id.uid.as_str() };
        let turn = Turn::new(Fixed {
            kind: one.kind,
            pace: Pace::of(one.probe),
            is_sidecar: Pod::is_sidecar(one.container),
            agent_started: deps.started_at,
        });
        Self {
            counter: deps.metrics.begin(one.kind.label(), &labels),
            pace: deps.paces.of(one.kind.label(), Handler::of(one.probe).label()),
            pod: pod.clone(),
            container: container.into(),
            place: one.place,
            turn,
            base,
            moment: None,
            look: None,
            told: None,
            runs: None,
            attempt: None,
            retry_at: None,
            is_asked: false,
            asked_at: None,
        }
    }

    /// For what it is.
    pub fn kind(&self) -> Kind {
        self.turn.fixed().kind
    }

    /// It, as that pod declares it.
    pub fn declared<'a>(&self, pod: &'a Pod) -> Option<Declared<'a>> {
        let (place, container) = pod.container(&self.container)?;
        Some(Declared { container, place, kind: self.kind(), probe: self.kind().of(container)? })
    }

    /// The first of its moments that is still to come, or sooner where it is asked for.
    pub fn next_moment(&self, now: Instant) -> Instant {
        let period = self.turn.fixed().pace.period;
        let passed = now.saturating_duration_since(self.base);
        let regular = if now < self.base {
            self.base
        } else {
            let into = Duration::from_nanos((passed.as_nanos() % period.as_nanos().max(1)).try_into().unwrap_or(0));
            now + period.saturating_sub(into)
        };
        let regular = self.retry_at.map_or(regular, |at| at.max(now).min(regular));
        if !self.is_asked {
            return regular;
        }
        let soonest = self.asked_at.map_or(now, |at| (at + BETWEEN_ASKED).max(now));
        soonest.min(regular)
    }

    /// Writes down what an attempt came to, for those who read that much.
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
                probeResult = state.word(), err = text, "Probe errored"
            ),
        }
    }
}

/// Where a pod is asked. One in the node's network that knows no address of its own is asked on the node's.
pub fn address(pod: &Pod, status: &api::PodStatus) -> Option<String> {
    let told = status.pod_ip.clone().filter(|ip| !ip.is_empty());
    told.or_else(|| pod.is_host_network().then(|| "127.0.0.1".to_owned()))
}
