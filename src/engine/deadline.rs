//! Active deadline of pods: `spec.activeDeadlineSeconds`. Pure. Implements spec 02a §10, 05 §2.

use jiff::{SignedDuration, Timestamp};

use berth_types::{Pod, PodSpec};

/// `status.reason`, and the reason of the event.
pub const REASON: &str = "DeadlineExceeded";
/// `status.message`, and the message of the event.
pub const MESSAGE: &str = "Pod was active on the node longer than the specified deadline";

/// The time at which the deadline expires; `None` without a deadline or a start time. `start` is
/// `status.startTime` of the status cache, else of the API.
pub fn expires_at(spec: &PodSpec, start: Option<Timestamp>) -> Option<Timestamp> {
    let allowed = spec.active_deadline_seconds?;
    // A deadline beyond the representable time never expires.
    start?.checked_add(SignedDuration::from_secs(allowed)).ok()
}

/// Whether the pod's active deadline is exceeded.
pub fn is_exceeded(pod: &Pod, start: Option<Timestamp>, now: Timestamp) -> bool {
    expires_at(pod.spec(), start).is_some_and(|at| now >= at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deadline_counts_from_the_start() {
        let at = |second| Timestamp::from_second(second).expect("in range");
        let exceeded = |deadline: Option<i64>, start: Option<i64>, now| {
            let object = serde_json::json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"},
                "spec": {"containers": [], "activeDeadlineSeconds": deadline}});
            let pod = Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete");
            is_exceeded(&pod, start.map(at), at(now))
        };
        assert!(exceeded(Some(30), Some(100), 131), "AC-05-13");
        assert!(exceeded(Some(30), Some(100), 130));
        assert!(!exceeded(Some(30), Some(100), 129));
        assert!(!exceeded(Some(30), None, 1000));
        assert!(!exceeded(None, Some(100), 1000));
        assert!(!exceeded(Some(i64::MAX), Some(100), 1000));
    }
}
