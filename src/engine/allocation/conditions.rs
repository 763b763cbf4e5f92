//! Pod conditions `PodResizePending` and `PodResizeInProgress`. Pure. Implements spec 02a §8.4.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use berth_types::{Pod, api};

const PENDING: &str = "PodResizePending";
const IN_PROGRESS: &str = "PodResizeInProgress";
/// Reason of the in-progress condition when actuation failed.
const ERROR: &str = "Error";

/// Why a resize is pending.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PendingReason {
    /// The resize may be granted later.
    Deferred,
    /// The resize is never granted on this node.
    Infeasible,
}

impl PendingReason {
    /// The condition's `reason`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Deferred => "Deferred",
            Self::Infeasible => "Infeasible",
        }
    }

    /// Label `reason` of `kubelet_pod_pending_resizes`.
    pub fn metric_label(self) -> &'static str {
        match self {
            Self::Deferred => "deferred",
            Self::Infeasible => "infeasible",
        }
    }

    /// Reason of the pod event.
    pub fn event_reason(self) -> &'static str {
        match self {
            Self::Deferred => "ResizeDeferred",
            Self::Infeasible => "ResizeInfeasible",
        }
    }
}

/// One resize condition; its status is `True` as long as it exists.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ResizeCondition<R> {
    /// The condition's reason.
    pub reason: R,
    /// The condition's message.
    pub message: String,
    /// `observedGeneration`: the pod generation of the resize.
    pub generation: i64,
    /// `lastProbeTime`: when the condition was last set.
    pub probed: Timestamp,
    /// `lastTransitionTime`: when the reason last changed.
    pub since: Timestamp,
}

/// Both resize conditions of one pod.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ResizeConditions {
    /// `PodResizePending`: the resize is not granted.
    pub pending: Option<ResizeCondition<PendingReason>>,
    /// `PodResizeInProgress`: the resize was granted and is being actuated, or its actuation failed.
    pub in_progress: Option<ResizeCondition<Actuation>>,
}

/// Actuation state of a granted resize.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Actuation {
    /// No error so far.
    Ongoing,
    /// The last attempt failed.
    Failed,
}

impl ResizeConditions {
    /// Whether neither condition is set.
    pub fn is_empty(&self) -> bool {
        self.pending.is_none() && self.in_progress.is_none()
    }

    /// Marks the resize of that generation as pending; returns whether reason or generation changed.
    pub fn set_pending(&mut self, reason: PendingReason, message: &str, generation: i64, now: Timestamp) -> bool {
        let old = self.pending.as_ref();
        let changed = old.is_none_or(|c| c.reason != reason || c.generation != generation);
        let since = old.filter(|c| c.reason == reason).map_or(now, |c| c.since);
        self.pending = Some(ResizeCondition { reason, message: message.to_owned(), generation, probed: now, since });
        changed
    }

    /// Marks a resize as granted now: in progress, no longer pending.
    pub fn start(&mut self, generation: i64, now: Timestamp) {
        self.pending = None;
        let (reason, message) = (Actuation::Ongoing, String::new());
        self.in_progress = Some(ResizeCondition { reason, message, generation, probed: now, since: now });
    }

    /// Marks a resize as in progress; an earlier error and its generation are kept.
    pub fn set_in_progress(&mut self, generation: i64, now: Timestamp) {
        match self.in_progress.as_mut() {
            Some(condition) => condition.probed = now,
            None => {
                let (reason, message) = (Actuation::Ongoing, String::new());
                self.in_progress = Some(ResizeCondition { reason, message, generation, probed: now, since: now });
            }
        }
    }

    /// Marks the actuation as failed; returns whether reason or message changed.
    pub fn set_failed(&mut self, message: &str, generation: i64, now: Timestamp) -> bool {
        let old = self.in_progress.as_ref();
        let changed = old.is_none_or(|c| c.reason != Actuation::Failed || c.message != message);
        let since = old.filter(|c| c.reason == Actuation::Failed).map_or(now, |c| c.since);
        let generation = old.map_or(generation, |c| c.generation);
        let reason = Actuation::Failed;
        self.in_progress =
            Some(ResizeCondition { reason, message: message.to_owned(), generation, probed: now, since });
        changed
    }

    /// Converts to the API's pod conditions.
    pub fn to_api(&self) -> Vec<api::PodCondition> {
        let pending = self.pending.as_ref().map(|c| written(PENDING, c.reason.as_str(), c));
        let in_progress = self.in_progress.as_ref().map(|c| {
            let reason = if c.reason == Actuation::Failed { ERROR } else { "" };
            written(IN_PROGRESS, reason, c)
        });
        pending.into_iter().chain(in_progress).collect()
    }

    /// Restores the conditions from the pod's API status after a restart of the agent.
    pub fn from_api(pod: &Pod) -> Self {
        let all = pod.status.as_ref().and_then(|s| s.conditions.as_deref()).unwrap_or_default();
        let find = |kind: &str| all.iter().find(|c| c.type_ == kind && c.status == "True");
        let pending = find(PENDING).and_then(|c| {
            let reasons = [PendingReason::Deferred, PendingReason::Infeasible];
            let reason = reasons.into_iter().find(|r| c.reason.as_deref() == Some(r.as_str()))?;
            Some(read(c, reason))
        });
        let in_progress = find(IN_PROGRESS).map(|c| {
            let failed = c.reason.as_deref() == Some(ERROR);
            read(c, if failed { Actuation::Failed } else { Actuation::Ongoing })
        });
        Self { pending, in_progress }
    }
}

fn written<R>(kind: &str, reason: &str, condition: &ResizeCondition<R>) -> api::PodCondition {
    let filled = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    api::PodCondition {
        type_: kind.to_owned(),
        status: "True".to_owned(),
        reason: filled(reason),
        message: filled(&condition.message),
        observed_generation: Some(condition.generation).filter(|g| *g != 0),
        last_probe_time: Some(Time(condition.probed)),
        last_transition_time: Some(Time(condition.since)),
    }
}

fn read<R>(condition: &api::PodCondition, reason: R) -> ResizeCondition<R> {
    let time = |t: &Option<Time>| t.as_ref().map_or(Timestamp::UNIX_EPOCH, |t| t.0);
    ResizeCondition {
        reason,
        message: condition.message.clone().unwrap_or_default(),
        generation: condition.observed_generation.unwrap_or(0),
        probed: time(&condition.last_probe_time),
        since: time(&condition.last_transition_time),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("in range")
    }

    #[test]
    fn transitions_follow_the_reason_and_probes_every_set() {
        let mut both = ResizeConditions::default();
        assert!(both.set_pending(PendingReason::Deferred, "a", 1, at(1)));
        assert!(!both.set_pending(PendingReason::Deferred, "b", 1, at(2)), "only the message changed");
        let pending = both.pending.clone().expect("set");
        assert_eq!((pending.since, pending.probed, pending.message.as_str()), (at(1), at(2), "b"));
        assert!(both.set_pending(PendingReason::Deferred, "b", 2, at(3)), "a new generation");
        assert!(both.set_pending(PendingReason::Infeasible, "b", 2, at(4)));
        assert_eq!(both.pending.as_ref().map(|c| c.since), Some(at(4)));
    }

    #[test]
    fn an_empty_update_keeps_the_error_and_the_generation() {
        let mut both = ResizeConditions::default();
        both.start(3, at(1));
        assert!(both.set_failed("no", 4, at(2)));
        assert!(!both.set_failed("no", 5, at(3)));
        both.set_in_progress(6, at(4));
        let c = both.in_progress.clone().expect("set");
        assert_eq!((c.reason, c.message.as_str(), c.generation, c.since), (Actuation::Failed, "no", 3, at(2)));
        both.start(7, at(5));
        assert_eq!(both.in_progress.as_ref().map(|c| (c.reason, c.generation)), Some((Actuation::Ongoing, 7)));
    }

    #[test]
    fn conditions_survive_in_the_api() {
        let mut both = ResizeConditions::default();
        both.set_failed("no", 4, at(2));
        both.set_pending(PendingReason::Deferred, "later", 5, at(3));
        let api = both.to_api();
        assert_eq!(api.iter().map(|c| c.type_.as_str()).collect::<Vec<_>>(), [PENDING, IN_PROGRESS]);
        let object = serde_json::json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {"containers": []}, "status": {"conditions": api}});
        let pod = Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete");
        assert_eq!(ResizeConditions::from_api(&pod), both);
    }
}
