//! Ends that come to a pod in a sync turn and are not its containers': its deadline, and a node that cannot have it after
//! all (spec 02a §9.7, 07 §5.1).

use std::{sync::Arc, time::Duration};

use tracing::warn;

use super::{
    WorkerContext,
    sync::{Memory, Outcome, Turn},
};
use crate::{
    engine::{deadline, lifecycle::Done, ports::Event},
    pod::{Pod, observed::ObservedPod},
    status::{self, Build},
};

/// The node takes no more volumes.
const OVER_LIMIT: &str = "VolumeAttachmentLimitExceeded";

impl Turn<'_> {
    /// Whether the pod is past its active deadline; else remembers to wake up when it is.
    pub(super) fn past_deadline(&mut self, pod: &Pod) -> Option<status::Eviction> {
        let previous = self.context.status.before(pod);
        let told = previous.as_deref().or(pod.status.as_deref());
        let start = told.and_then(|status| status.start_time.as_ref()).map(|time| time.0);
        let now = self.context.clock.now();
        self.memory.deadline = deadline::expires_at(pod.spec(), start);
        if !deadline::is_exceeded(pod, start, now) {
            return None;
        }
        self.memory.deadline = None;
        self.context.events.record(Event::normal(pod.id(), deadline::REASON, deadline::MESSAGE));
        Some(status::Eviction { reason: deadline::REASON.to_owned(), message: deadline::MESSAGE.to_owned() })
    }

    /// How long until the active deadline passes.
    pub fn until_deadline(context: &WorkerContext, memory: &Memory) -> Option<Duration> {
        let left = memory.deadline?.duration_since(context.clock.now());
        Some(Duration::try_from(left).unwrap_or_default())
    }

    /// The node takes no more volumes: what replaces the pod may find another one.
    pub(super) fn refuse(&mut self, pod: &Pod, text: &str) -> String {
        warn!(pod = %pod.object_name(), podUID = %pod.uid(), reason = OVER_LIMIT, err = %text, "Pod was rejected");
        self.context.events.record(Event::warning(pod.id(), OVER_LIMIT, text));
        let message = format!("Pod was rejected: {text}");
        self.memory.rejection = Some(status::Eviction { reason: OVER_LIMIT.to_owned(), message: message.clone() });
        message
    }

    /// The pod has failed.
    pub(super) fn reject(&mut self, pod: &Arc<Pod>, observed: &ObservedPod) -> Outcome {
        let built = self.build(pod, observed, Build::Ongoing);
        self.context.status.set(pod, built, self.context.clock.now());
        self.context.allocations.finished(pod.uid());
        Outcome::Moved(Done::PhaseTerminal)
    }
}
