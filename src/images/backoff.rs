//! Image pull back-off per pod and image (spec 03b §1.1 "Constants"). Pure.
//!
//! The delay applies per pod and image as written, not per container: 10 s, doubling to 300 s, and
//! reset 600 s after the last failure. New pull secrets end the delay at once (spec 03b §15 item 4):
//! the old ones may have been the cause of the failure.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use berth_sys::backoff::Backoff;
use berth_types::PodUid;

const DELAYS: Backoff = Backoff::new(Duration::from_secs(10), Duration::from_secs(300));
const FORGET: Duration = Duration::from_secs(600);

/// Key of a back-off: pod, and image as the pod writes it.
pub type Key = (PodUid, String);

/// Result of the last failed attempt.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LastPullFailure {
    /// Waiting reason of the container.
    pub reason: &'static str,
    /// Waiting message of the container.
    pub message: String,
}

#[derive(Debug)]
struct BackoffStep {
    backoff: Backoff,
    until: Instant,
    failed_at: Instant,
    secrets: [u8; 32],
    failure: Option<LastPullFailure>,
}

/// Active back-off of a pod's image pull, with the failure that preceded it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PullInBackOff {
    /// End of the back-off.
    pub until: Instant,
    /// The previous failure; `None` if that attempt was interrupted.
    pub previous: Option<LastPullFailure>,
}

/// Back-off state of failed pulls. Retains an entry for 10 minutes after its last failure.
#[derive(Debug, Default)]
pub struct PullBackoff {
    steps: HashMap<Key, BackoffStep>,
}

impl PullBackoff {
    /// Whether a pull with these secrets (their fingerprint) is in back-off now.
    pub fn active(&self, key: &Key, secrets: &[u8; 32], now: Instant) -> Option<PullInBackOff> {
        let step = self.steps.get(key)?;
        if step.secrets != *secrets || now >= step.until {
            return None;
        }
        Some(PullInBackOff { until: step.until, previous: step.failure.clone() })
    }

    /// A new attempt begins: the previous failure is cleared, the delay is kept.
    pub fn began(&mut self, key: &Key) {
        if let Some(step) = self.steps.get_mut(key) {
            step.failure = None;
        }
    }

    /// Records a failed attempt; returns the time of the next allowed attempt.
    pub fn failed(&mut self, key: Key, secrets: [u8; 32], failure: LastPullFailure, now: Instant) -> Instant {
        self.steps.retain(|_, step| now.saturating_duration_since(step.failed_at) < FORGET);
        let mut backoff = match self.steps.get(&key) {
            Some(step) if step.secrets == secrets => step.backoff,
            _ => DELAYS,
        };
        let until = now + backoff.next_delay();
        self.steps.insert(key, BackoffStep { backoff, until, failed_at: now, secrets, failure: Some(failure) });
        until
    }

    /// Removes the back-offs of a pod.
    pub fn forget(&mut self, pod: &PodUid) {
        self.steps.retain(|(uid, _), _| uid != pod);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRETS: [u8; 32] = [1; 32];

    fn key(image: &str) -> Key {
        ("u1".into(), image.to_owned())
    }

    fn failure() -> LastPullFailure {
        LastPullFailure { reason: "ErrImagePull", message: "no such host".to_owned() }
    }

    #[test]
    fn steps_double_to_their_cap_and_are_forgotten() {
        let start = Instant::now();
        let at = |secs: u64| start + Duration::from_secs(secs);
        let mut backoff = PullBackoff::default();
        // AC-03b-6: fails at 0, 10, 30: not before 70
        for (fails, next) in [(0, 10), (10, 30), (30, 70), (70, 150), (150, 310), (310, 610), (610, 910)] {
            assert_eq!(backoff.active(&key("x"), &SECRETS, at(fails)), None, "{fails}");
            assert_eq!(backoff.failed(key("x"), SECRETS, failure(), at(fails)), at(next), "{fails}");
            assert!(backoff.active(&key("x"), &SECRETS, at(next - 1)).is_some(), "{next}");
        }
        assert_eq!(backoff.failed(key("x"), SECRETS, failure(), at(1210)), at(1220), "600 s later it starts again");
    }

    #[test]
    fn a_step_belongs_to_one_pod_and_image() {
        let now = Instant::now();
        let mut backoff = PullBackoff::default();
        backoff.failed(key("x"), SECRETS, failure(), now);
        assert_eq!(backoff.active(&key("y"), &SECRETS, now), None);
        assert_eq!(backoff.active(&("u2".into(), "x".to_owned()), &SECRETS, now), None);
        let active = backoff.active(&key("x"), &SECRETS, now).expect("held");
        assert_eq!(active.previous, Some(failure()));
        backoff.began(&key("x"));
        assert_eq!(backoff.active(&key("x"), &SECRETS, now).expect("still held").previous, None);
        assert_eq!(backoff.active(&key("x"), &[2; 32], now), None, "new secrets are tried at once");
        backoff.forget(&"u1".into());
        assert!(backoff.steps.is_empty());
    }
}
