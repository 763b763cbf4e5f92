//! Reconciliation state of one pod's status.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use tokio::time::Instant;

use super::{
    next_step::{self, IdleReason, ObservedPod, StatusHistory, StatusStep},
    retry_policy::NameOwner,
    server_pod::{ServerPod, WriteResponse, newest},
};
use crate::{api::ApiError, backoff, versions::is_older};
use berth_status::CachedStatus;
use berth_types::Pod;

/// Maximum back-off while the API server is unreachable (spec 10a §21: statuses are written within 5 s).
const UNREACHED: Duration = Duration::from_secs(4);

/// State of one pod.
pub struct PodStatusState {
    /// Latest local status.
    pub kept: CachedStatus,
    /// Results of earlier steps.
    pub memory: StatusHistory,
    synced: bool,
    shown: Option<Arc<Pod>>,
    /// Boxed: mostly absent, and a status is nearly a kilobyte.
    answered: Option<Box<WriteResponse>>,
    /// Whether a step may be due.
    due: bool,
    /// Whether the pod is never written again.
    gone: bool,
    /// Start of the write in flight.
    in_flight: Option<Instant>,
    failures: u32,
    not_before: Option<Instant>,
}

impl PodStatusState {
    /// Returns the state of a status that was not compared yet; a step is due.
    pub fn new(kept: CachedStatus) -> Self {
        Self {
            kept,
            memory: StatusHistory::default(),
            synced: false,
            shown: None,
            answered: None,
            due: true,
            gone: false,
            in_flight: None,
            failures: 0,
            not_before: None,
        }
    }

    /// Records the latest status and the watched pod. A watch event that repeats our own write is no change.
    pub fn observe(&mut self, kept: CachedStatus, synced: bool, shown: Option<Arc<Pod>>) {
        let same_pod = match (&self.shown, &shown) {
            (Some(before), Some(now)) => Arc::ptr_eq(before, now),
            (None, None) => true,
            _ => false,
        };
        let before = self.server_version();
        let news = self.kept.version != kept.version || self.kept.finished != kept.finished || self.synced != synced;
        self.take(kept);
        self.synced = synced;
        self.shown = shown;
        let behind = |answer: &WriteResponse| {
            let shown = self.shown.as_deref().map(|pod| ServerPod::watched(pod));
            shown.is_some_and(|shown| shown.uid == answer.pod().uid && is_older(shown.version, answer.pod().version))
        };
        self.answered = self.answered.take().filter(|answer| behind(answer));
        self.due |= news || (!same_pod && before != self.server_version());
    }

    /// Records the latest local status.
    pub fn keep(&mut self, kept: CachedStatus) {
        self.due |= self.kept.version != kept.version;
        self.take(kept);
    }

    fn take(&mut self, kept: CachedStatus) {
        // Equal content may be a shared copy: the status manager may store the watched status in place of its own.
        let has_same_status = || Arc::ptr_eq(&kept.status, &self.kept.status) || kept.status == self.kept.status;
        if kept.version < self.kept.version || (kept.version == self.kept.version && !has_same_status()) {
            self.memory.settled = None; // the pod was forgotten and added again: its versions restarted at 1
        }
        self.kept = kept;
    }

    /// Computes the next step.
    pub fn next(&mut self, now: Timestamp) -> StatusStep {
        self.due = false;
        let step = next_step::next(&self.kept, self.sight(), &self.memory, now);
        self.gone = step == StatusStep::Rest(IdleReason::Gone);
        step
    }

    /// Whether the server lacks the latest version and may get it.
    pub fn is_pending(&self) -> bool {
        self.kept.unsent_since.is_some() && !self.gone
    }

    /// Whether a step is due and may start now.
    pub fn is_ready(&self, now: Instant) -> bool {
        self.due && self.in_flight.is_none() && self.not_before.is_none_or(|at| at <= now)
    }

    /// When a due step may start, if it is in back-off.
    pub fn wakes_at(&self) -> Option<Instant> {
        self.not_before.filter(|_| self.due && self.in_flight.is_none())
    }

    /// Sort key among the ready pods: urgent writes first, then by waiting time.
    pub fn rank(&self) -> (bool, Option<Timestamp>) {
        (!self.is_urgent(), self.kept.unsent_since)
    }

    /// Whether it is a terminal status or a change of readiness.
    pub fn is_urgent(&self) -> bool {
        next_step::is_urgent(&self.kept, self.sight())
    }

    /// Marks a write as in flight.
    pub fn launched(&mut self, now: Instant) {
        self.in_flight = Some(now);
    }

    /// Start of the write in flight.
    pub fn in_flight(&self) -> Option<Instant> {
        self.in_flight
    }

    /// Marks the write as completed, successful or refused; another step may be due.
    pub fn landed(&mut self) {
        (self.in_flight, self.failures, self.not_before, self.due) = (None, 0, None, true);
    }

    /// Records the server's response, which has the pod's latest state.
    pub fn answered(&mut self, answer: WriteResponse) {
        self.answered = Some(Box::new(answer));
    }

    /// Marks the write as failed; schedules and returns the back-off: `wait`, or else the pod's own. While the server
    /// is unreachable the back-off stays short, so that statuses are written soon after an outage.
    pub fn failed(&mut self, wait: Option<Duration>, error: &ApiError, now: Instant) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let wait = match error {
            ApiError::Unreachable(_) => backoff(self.failures).min(UNREACHED),
            _ => wait.unwrap_or_else(|| backoff(self.failures)),
        };
        (self.in_flight, self.not_before, self.due) = (None, Some(now + wait), true);
        wait
    }

    /// Which pod the watch shows under the name.
    pub fn holder(&self) -> NameOwner {
        match self.shown.as_deref().map(|pod| ServerPod::watched(pod)) {
            None => NameOwner::NoPod,
            Some(shown) if shown.uid == self.kept.pod.uid.as_str() => NameOwner::Same,
            Some(shown) if shown.mirror_of == Some(self.kept.pod.uid.as_str()) => NameOwner::Same,
            Some(_) => NameOwner::Another,
        }
    }

    fn sight(&self) -> ObservedPod<'_> {
        match &self.shown {
            Some(shown) => ObservedPod::Seen(newest(ServerPod::watched(shown), self.answered.as_deref())),
            None if self.synced => ObservedPod::Absent,
            None => ObservedPod::Unknown,
        }
    }

    fn server_version(&self) -> Option<(String, String)> {
        match self.sight() {
            ObservedPod::Seen(server) => Some((server.uid.to_owned(), server.version.to_owned())),
            ObservedPod::Unknown | ObservedPod::Absent => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_status::status_merge::RemainingResources;
    use berth_types::{PodRef, api};

    fn kept(version: u64, phase: &str) -> CachedStatus {
        CachedStatus {
            pod: PodRef { uid: "u".into(), name: "p".into(), namespace: "n".into() },
            is_static: false,
            status: Arc::new(api::PodStatus { phase: Some(phase.to_owned()), ..Default::default() }),
            version,
            unsent_since: None,
            finished: false,
            remains: RemainingResources::Something,
        }
    }

    #[test]
    fn a_settled_version_stays_settled_while_the_status_is_the_same() {
        let settled = next_step::ComparedVersions { status: 3, server: "7".to_owned() };
        for (name, next, stays) in [
            ("a copy of it", kept(3, "Running"), true),
            ("a newer one", kept(4, "Failed"), true),
            ("begun again, and as far as before", kept(3, "Pending"), false),
            ("begun again", kept(1, "Running"), false),
        ] {
            for way in [
                |track: &mut PodStatusState, next| track.observe(next, true, None),
                |track: &mut PodStatusState, next| track.keep(next),
            ] {
                let mut track = PodStatusState::new(kept(3, "Running"));
                track.memory.settled = Some(settled.clone());
                way(&mut track, next.clone());
                assert_eq!(track.memory.settled.is_some(), stays, "{name}");
            }
        }
    }
}
