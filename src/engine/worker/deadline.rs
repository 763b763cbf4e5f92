//! Pod termination during sync: active deadline, and rejection for the volume attachment limit.
//!
//! Implements spec 02a §9.7, 07 §5.1.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{
    WorkerContext,
    pod_sync::{Outcome, SyncContext, WorkerState},
};
use crate::engine::{deadline, lifecycle::SyncTransition};
use berth_ports::EventRecord;
use berth_status::{BuildKind, Phase};
use berth_types::{Pod, api, observation::ObservedPod};

/// Reason of the event and status when the node's volume attachment limit is exceeded.
const OVER_LIMIT: &str = "VolumeAttachmentLimitExceeded";

fn start_of(status: Option<&api::PodStatus>) -> Option<Timestamp> {
    Some(status?.start_time.as_ref()?.0)
}

/// Runs the work to completion; cancels `stopping` when the deadline expires first.
pub(super) async fn by_deadline<T>(
    left: Option<Duration>,
    stopping: CancellationToken,
    work: impl Future<Output = T>,
) -> T {
    let Some(left) = left else { return work.await };
    tokio::pin!(work);
    tokio::select! {
        biased;
        done = &mut work => return done,
        () = tokio::time::sleep(left) => stopping.cancel(),
    }
    work.await
}

impl SyncContext<'_> {
    /// Whether the pod is past its active deadline; records the event the first time. A pod that was
    /// terminal before keeps its status; a pod terminated by its deadline has not succeeded, whatever
    /// the exit codes of its containers.
    pub(super) fn past_deadline(&self, pod: &Pod) -> Option<berth_status::Eviction> {
        pod.spec().active_deadline_seconds?;
        let previous = self.context.status.previous(pod);
        let reported = previous.as_deref().or(pod.status.as_deref());
        let has_ended = reported.and_then(Phase::of).is_some_and(Phase::is_terminal) || pod.is_api_terminal();
        let is_past = if has_ended {
            reported.and_then(|status| status.reason.as_deref()) == Some(deadline::REASON)
        } else {
            deadline::is_exceeded(pod, start_of(reported), self.context.clock.now())
        };
        if is_past && !has_ended {
            self.context.events.record(EventRecord::normal(pod.id(), deadline::REASON, deadline::MESSAGE));
        }
        is_past.then(|| berth_status::Eviction {
            reason: deadline::REASON.to_owned(),
            message: deadline::MESSAGE.to_owned(),
        })
    }

    /// Stores the wake-up time of the active deadline, once the pod's status has a start time.
    pub(super) fn note_deadline(&mut self, pod: &Pod) {
        let kept = self.context.status.status(pod.uid());
        self.memory.deadline = deadline::expires_at(pod.spec(), start_of(kept.as_deref()));
    }

    /// Clears an expired deadline: this sync handles it; if the sync fails it is retried like any
    /// other.
    pub(super) fn take_due_deadline(&mut self) {
        let now = self.context.clock.now();
        self.memory.deadline.take_if(|at| *at <= now);
    }

    /// Time until the active deadline expires.
    pub fn until_deadline(context: &WorkerContext, memory: &WorkerState) -> Option<Duration> {
        let left = memory.deadline?.duration_since(context.clock.now());
        Some(Duration::try_from(left).unwrap_or_default())
    }

    /// Rejects the pod because the node's volume attachment limit is exceeded: its replacement may be
    /// scheduled to another node.
    pub(super) fn refuse(&mut self, pod: &Pod, text: &str) -> String {
        warn!(pod = %pod.object_name(), podUID = %pod.uid(), reason = OVER_LIMIT, err = %text, "Pod was rejected");
        self.context.events.record(EventRecord::warning(pod.id(), OVER_LIMIT, text));
        let message = format!("Pod was rejected: {text}");
        self.memory.rejection =
            Some(berth_status::Eviction { reason: OVER_LIMIT.to_owned(), message: message.clone() });
        message
    }

    /// Publishes the status of the rejected pod; its phase is terminal.
    pub(super) fn reject(&mut self, pod: &Arc<Pod>, observed: &ObservedPod) -> Outcome {
        let built = self.build(pod, observed, BuildKind::Ongoing);
        self.context.status.set(pod, built, self.context.clock.now());
        self.context.allocations.finished(pod.uid());
        Outcome::Moved(SyncTransition::PhaseTerminal)
    }
}
