//! Pod lifecycle state machine: syncing, terminating, terminated, finished. Pure.
//!
//! Data of one phase is in that phase's variant; no transition goes backwards. Inputs are the desired
//! state of the sync loop ([`DesiredState`], latest wins) and the outcome of a worker's sync ([`SyncTransition`]).
//! Implements spec 02a §9.1-9.4.

use std::time::Duration;

use super::grace::{self, GraceInputs};
use berth_types::Pod;

/// Why a pod is stopped; determines whether its content on disk may be removed afterwards.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StopCause {
    /// Deleted through the API, removed from its source, or known to the runtime only.
    Deleted,
    /// Evicted or preempted.
    Evicted,
    /// Stopped by the graceful node shutdown: its content is kept, so that its logs can still be read.
    NodeShutdown,
    /// Its phase is terminal (all containers have exited, past its deadline, rejected).
    Completed,
}

/// A request to stop a pod.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StopRequest {
    /// Cause of the stop.
    pub cause: StopCause,
    /// Grace period in whole seconds that overrides the pod's own.
    pub grace_override: Option<i64>,
    /// Final status that overrides the computed one.
    pub status: Option<StatusOverride>,
}

/// A final status set by eviction, preemption, or node shutdown.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StatusOverride {
    /// `status.reason`.
    pub reason: String,
    /// `status.message`.
    pub message: String,
    /// Reason and message of a `DisruptionTarget=True` condition to add.
    pub disruption: Option<(String, String)>,
    /// Whether a pod that has succeeded keeps its phase; otherwise its phase is `Failed`.
    pub keeps_success: bool,
    /// Whether the pod is published as unready before its containers are stopped, regardless of their
    /// readiness.
    pub is_unready: bool,
    /// Part of the grace period reserved for publishing the pod's final status: containers that are
    /// still running are killed before.
    pub status_reserve: Duration,
}

/// Desired state of a pod as the sync loop wants it; latest wins.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct DesiredState {
    /// All stop requests so far, merged into one.
    pub stop: Option<StopRequest>,
}

/// Lifecycle state of a pod.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Lifecycle {
    /// Its containers are started, restarted, and observed.
    Syncing,
    /// Its containers are being stopped.
    Terminating {
        /// Cause of the stop.
        cause: StopCause,
        /// Effective grace period in seconds, at least 1.
        grace: i64,
    },
    /// No container runs any more; volumes and cgroup are being removed.
    Terminated {
        /// Cause of the stop.
        cause: StopCause,
    },
    /// Nothing is left to do; only the record that the UID was here remains.
    Finished {
        /// Cause of the stop.
        cause: StopCause,
    },
}

/// Outcome of a worker's sync that moves the lifecycle on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SyncTransition {
    /// A sync found the pod's phase terminal.
    PhaseTerminal,
    /// All containers are stopped.
    Stopped,
    /// Volumes, cgroup, and the rest are removed.
    CleanedUp,
}

impl Lifecycle {
    /// Initial state of a new pod. A pod whose API phase is terminal and of which nothing is alive
    /// starts terminated, so that clean-up and final status still happen.
    pub fn first(api_terminal: bool, alive: bool) -> Self {
        if api_terminal && !alive {
            return Self::Terminated { cause: StopCause::Completed };
        }
        Self::Syncing
    }

    /// The state after applying the desired state. `pod` is `None` for a pod that only the runtime
    /// knows: it is always terminating, with a grace period of 1 s.
    #[must_use]
    pub fn apply(self, desired: &DesiredState, pod: Option<&Pod>) -> Self {
        let Some(pod) = pod else {
            return match self {
                Self::Syncing => Self::Terminating { cause: StopCause::Deleted, grace: 1 },
                other => other,
            };
        };
        let asked = cause(desired, pod);
        let grace_override = desired.stop.as_ref().and_then(|stop| stop.grace_override);
        match (self, asked) {
            (Self::Syncing, None) => Self::Syncing,
            (Self::Syncing, Some(cause)) => {
                Self::Terminating { cause, grace: effective_grace(pod, None, grace_override) }
            }
            (Self::Terminating { cause: old, grace }, asked) => Self::Terminating {
                cause: stronger(old, asked),
                grace: effective_grace(pod, Some(grace), grace_override),
            },
            (Self::Terminated { cause }, asked) => Self::Terminated { cause: stronger(cause, asked) },
            (Self::Finished { cause }, asked) => Self::Finished { cause: stronger(cause, asked) },
        }
    }

    /// The state after an outcome of the worker.
    #[must_use]
    pub fn after(self, done: SyncTransition, pod: Option<&Pod>) -> Self {
        match (self, done) {
            (Self::Syncing, SyncTransition::PhaseTerminal) => Self::Terminating {
                cause: StopCause::Completed,
                grace: pod.map_or(1, |pod| effective_grace(pod, None, None)),
            },
            (Self::Terminating { cause, .. }, SyncTransition::Stopped) if pod.is_some() => Self::Terminated { cause },
            (Self::Terminating { cause, .. }, SyncTransition::Stopped)
            | (Self::Terminated { cause }, SyncTransition::CleanedUp) => Self::Finished { cause },
            (other, _) => other,
        }
    }

    /// Whether termination was requested or has begun.
    pub fn is_stopping(&self) -> bool {
        !matches!(self, Self::Syncing)
    }

    /// Whether no container of the pod runs any more.
    pub fn is_terminated(&self) -> bool {
        matches!(self, Self::Terminated { .. } | Self::Finished { .. })
    }

    /// Whether nothing is left to do.
    pub fn is_finished(&self) -> bool {
        matches!(self, Self::Finished { .. })
    }

    /// Whether containers and files of the pod may be removed: it is evicted, or deleted and
    /// terminated.
    pub fn content_removable(&self) -> bool {
        match self {
            Self::Syncing => false,
            Self::Terminating { cause, .. } => *cause == StopCause::Evicted,
            Self::Terminated { cause } | Self::Finished { cause } => {
                matches!(cause, StopCause::Deleted | StopCause::Evicted)
            }
        }
    }

    /// The `lifecycle` label of `kubelet_working_pods`.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Syncing => "sync",
            Self::Terminating { .. } => "terminating",
            Self::Terminated { .. } | Self::Finished { .. } => "terminated",
        }
    }
}

/// Merges a stop request into the pending one: the latest status and the shortest grace period win.
pub fn merge_stop_requests(standing: Option<StopRequest>, new: StopRequest) -> StopRequest {
    let Some(old) = standing else { return new };
    StopRequest {
        cause: stronger(old.cause, Some(new.cause)),
        grace_override: match (old.grace_override, new.grace_override) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        },
        status: new.status.or(old.status),
    }
}

fn cause(desired: &DesiredState, pod: &Pod) -> Option<StopCause> {
    let ordered = desired.stop.as_ref().map(|stop| stop.cause);
    let deleted = pod.is_deleting().then_some(StopCause::Deleted);
    let terminal = pod.is_api_terminal().then_some(StopCause::Completed);
    match (ordered, deleted) {
        (Some(ordered), deleted) => Some(stronger(ordered, deleted)),
        (None, deleted) => deleted.or(terminal),
    }
}

/// Eviction outranks deletion (both allow removal of the content); both outrank causes that keep it.
fn stronger(old: StopCause, new: Option<StopCause>) -> StopCause {
    let rank = |cause: StopCause| match cause {
        StopCause::Completed => 0,
        StopCause::NodeShutdown => 1,
        StopCause::Deleted => 2,
        StopCause::Evicted => 3,
    };
    match new {
        Some(new) if rank(new) > rank(old) => new,
        _ => old,
    }
}

/// The effective grace period in seconds; `standing` is the one in effect so far.
fn effective_grace(pod: &Pod, standing: Option<i64>, kill: Option<i64>) -> i64 {
    let deletion = pod.metadata.deletion_grace_period_seconds;
    let spec = pod.spec().termination_grace_period_seconds;
    grace::effective(GraceInputs { stored: standing, deletion, kill, spec }).seconds
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(meta: serde_json::Value, phase: &str) -> Pod {
        let mut metadata = json!({"name": "p", "namespace": "n", "uid": "u"});
        for (key, value) in meta.as_object().expect("an object") {
            metadata[key] = value.clone();
        }
        let spec = json!({"terminationGracePeriodSeconds": 30, "containers": [{"name": "c"}]});
        let object = json!({"metadata": metadata, "spec": spec, "status": {"phase": phase}});
        Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
    }

    fn stop(cause: StopCause, grace_override: Option<i64>) -> DesiredState {
        DesiredState { stop: Some(StopRequest { cause, grace_override, status: None }) }
    }

    #[test]
    fn a_pod_lives_forwards_only() {
        let plain = pod(json!({}), "Pending");
        let syncing = Lifecycle::first(false, false);
        assert_eq!(syncing.clone().apply(&DesiredState::default(), Some(&plain)), Lifecycle::Syncing);
        let stopping = syncing.apply(&stop(StopCause::Deleted, None), Some(&plain));
        assert_eq!(stopping, Lifecycle::Terminating { cause: StopCause::Deleted, grace: 30 });
        assert_eq!(
            stopping.clone().apply(&DesiredState::default(), Some(&plain)),
            stopping,
            "a wish withdrawn changes nothing"
        );
        let stopped = stopping.after(SyncTransition::Stopped, Some(&plain));
        assert_eq!(stopped, Lifecycle::Terminated { cause: StopCause::Deleted });
        let finished = stopped.after(SyncTransition::CleanedUp, Some(&plain));
        assert!(finished.is_finished() && finished.content_removable());
        assert_eq!(finished.clone().apply(&DesiredState::default(), Some(&plain)), finished);
    }

    #[test]
    fn deletion_terminal_phases_and_orders_stop_a_pod() {
        let deleting = pod(json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 7}), "");
        // AC-02a-9
        let stopping = Lifecycle::Syncing.apply(&DesiredState::default(), Some(&deleting));
        assert_eq!(stopping, Lifecycle::Terminating { cause: StopCause::Deleted, grace: 7 });
        let failed = Lifecycle::Syncing.apply(&DesiredState::default(), Some(&pod(json!({}), "Failed")));
        assert_eq!(failed, Lifecycle::Terminating { cause: StopCause::Completed, grace: 30 });
        assert!(
            !failed.after(SyncTransition::Stopped, Some(&deleting)).content_removable(),
            "completed pods keep their content"
        );
        assert_eq!(Lifecycle::first(true, false), Lifecycle::Terminated { cause: StopCause::Completed });
        assert_eq!(Lifecycle::first(true, true), Lifecycle::Syncing);
    }

    #[test]
    fn content_is_removable_after_eviction_or_deletion() {
        use StopCause::{Completed, Deleted, Evicted, NodeShutdown};
        // Spec 02a §9.3, 05 §7.4: a node shutdown is not an eviction.
        for (causes, while_it_ends, afterwards) in [
            (&[Evicted][..], true, true),
            (&[Deleted], false, true),
            (&[Completed], false, false),
            (&[NodeShutdown], false, false),
            (&[NodeShutdown, Deleted], false, true),
            (&[Deleted, NodeShutdown], false, true),
            (&[Evicted, NodeShutdown], true, true),
        ] {
            let pod = pod(json!({}), "");
            let apply = |life: Lifecycle, cause: &StopCause| life.apply(&stop(*cause, None), Some(&pod));
            let stopping = causes.iter().fold(Lifecycle::Syncing, apply);
            assert_eq!(stopping.content_removable(), while_it_ends, "{causes:?}");
            let stopped = stopping.after(SyncTransition::Stopped, Some(&pod));
            assert_eq!(stopped.content_removable(), afterwards, "{causes:?}");
            let finished = stopped.after(SyncTransition::CleanedUp, Some(&pod));
            assert!(apply(finished, &Deleted).content_removable(), "{causes:?}: no source has the pod any more");
        }
    }

    #[test]
    fn what_only_the_runtime_knows_goes_with_one_second() {
        // AC-02a-17
        let stopping = Lifecycle::Syncing.apply(&DesiredState::default(), None);
        assert_eq!(stopping, Lifecycle::Terminating { cause: StopCause::Deleted, grace: 1 });
        assert_eq!(stopping.after(SyncTransition::Stopped, None), Lifecycle::Finished { cause: StopCause::Deleted });
    }

    #[test]
    fn a_shorter_grace_reaches_a_pod_that_is_stopping() {
        // AC-02a-18
        let deleting = |grace: i64| {
            pod(json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": grace}), "")
        };
        let first = Lifecycle::Syncing.apply(&DesiredState::default(), Some(&deleting(30)));
        assert_eq!(first, Lifecycle::Terminating { cause: StopCause::Deleted, grace: 30 });
        let second = first.apply(&DesiredState::default(), Some(&deleting(0)));
        assert_eq!(second, Lifecycle::Terminating { cause: StopCause::Deleted, grace: 1 });
    }

    #[test]
    fn orders_fold_into_the_strongest() {
        let order = |cause, grace_override| StopRequest { cause, grace_override, status: None };
        let folded = merge_stop_requests(Some(order(StopCause::Deleted, Some(5))), order(StopCause::Evicted, Some(9)));
        assert_eq!(folded, order(StopCause::Evicted, Some(5)));
        assert_eq!(merge_stop_requests(None, order(StopCause::Deleted, None)), order(StopCause::Deleted, None));
    }
}
