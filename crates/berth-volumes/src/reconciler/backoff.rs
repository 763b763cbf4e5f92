//! Exponential back-off of failed volume operations, per operation name and pod. Pure.
//!
//! An operation waits neither for another operation's back-off nor for another pod's. A delay doubles until its
//! operation succeeds, whatever else runs in between: otherwise two operations that fail alternately would never back
//! off. A failure of the whole volume (its stage) delays all of its pods. Implements spec 07 §3.1, §3.5.

use std::time::{Duration, Instant};

use berth_sys::backoff::Backoff;
use berth_types::PodUid;

/// Initial and maximum delay.
const PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(122));

/// Operation name, as used by the metrics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpName {
    /// Stage where due, and publish to a pod.
    Mount,
    /// Stage where due, and publish to a pod, as a block device.
    Map,
    /// Unpublish from a pod.
    Unmount,
    /// Unpublish from a pod, as a block device.
    Unmap,
    /// Unstage.
    UnmountDevice,
    /// Unstage a block device.
    UnmapDevice,
    /// Expand on the node.
    Resize,
}

#[derive(Clone, PartialEq, Debug)]
struct OperationBackoff {
    op: OpName,
    /// `None` for a failure of the whole volume.
    pod: Option<PodUid>,
    until: Instant,
    backoff: Backoff,
}

/// Back-offs of one volume.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Backoffs(Vec<OperationBackoff>);

impl OperationBackoff {
    fn concerns(&self, op: OpName, pod: Option<&PodUid>) -> bool {
        self.op == op && (self.pod.is_none() || self.pod.as_ref() == pod)
    }
}

impl Backoffs {
    /// Returns when the operation may run; `None` where it has no back-off.
    pub fn until(&self, op: OpName, pod: Option<&PodUid>) -> Option<Instant> {
        self.0.iter().filter(|record| record.concerns(op, pod)).map(|record| record.until).max()
    }

    /// Records a failure for that pod or for all; returns the new delay. A failure for one pod shows that the steps
    /// shared by all pods succeeded, so that it clears their back-off.
    pub fn failed(&mut self, op: OpName, pod: Option<&PodUid>, now: Instant) -> Duration {
        let concerned = self.0.iter().filter(|record| record.concerns(op, pod)).map(|record| record.backoff);
        let mut backoff = concerned.max_by_key(Backoff::peek).unwrap_or(Backoff::new(PAUSE.0, PAUSE.1));
        let pause = backoff.next_delay();
        self.succeeded(op, pod);
        self.0.push(OperationBackoff { op, pod: pod.cloned(), until: now + pause, backoff });
        pause
    }

    /// Records a success for that pod, which includes the steps shared by all pods.
    pub fn succeeded(&mut self, op: OpName, pod: Option<&PodUid>) {
        self.0.retain(|record| !record.concerns(op, pod));
    }

    /// Lets all operations run at once because the cause of failure may be gone; a repeated failure keeps doubling the
    /// delay.
    pub fn cured(&mut self, now: Instant) {
        self.0.iter_mut().for_each(|record| record.until = now);
    }

    /// Forgets the back-offs of a removed pod.
    pub fn forget(&mut self, pod: &PodUid) {
        self.0.retain(|record| record.pod.as_ref() != Some(pod));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_two_minutes() {
        let (now, mut backoffs) = (Instant::now(), Backoffs::default());
        assert_eq!(backoffs.until(OpName::Mount, None), None);
        let pauses: Vec<f64> = (0..10).map(|_| backoffs.failed(OpName::Mount, None, now).as_secs_f64()).collect();
        assert_eq!(pauses, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 122.0, 122.0]);
        assert_eq!(backoffs.until(OpName::Mount, None), Some(now + Duration::from_secs(122)));
        backoffs.cured(now);
        assert_eq!(backoffs.until(OpName::Mount, None), Some(now));
        backoffs.succeeded(OpName::Mount, None);
        assert_eq!(backoffs, Backoffs::default());
    }

    #[test]
    fn another_operation_does_not_wait() {
        // AC-07-34
        let (now, mut backoffs) = (Instant::now(), Backoffs::default());
        let pod = PodUid::from("u");
        backoffs.failed(OpName::Mount, None, now);
        assert_eq!(backoffs.until(OpName::Unmount, Some(&pod)), None);
        assert_eq!(backoffs.until(OpName::Mount, Some(&pod)), Some(now + PAUSE.0), "a volume covers its pods");
    }

    #[test]
    fn what_fails_in_turns_comes_to_rest() {
        let (now, mut backoffs) = (Instant::now(), Backoffs::default());
        let pod = PodUid::from("u");
        for _ in 0..10 {
            backoffs.failed(OpName::Mount, None, now);
            backoffs.failed(OpName::Unmount, Some(&pod), now);
        }
        for op in [OpName::Mount, OpName::Unmount] {
            assert_eq!(backoffs.until(op, Some(&pod)), Some(now + PAUSE.1));
        }
        backoffs.succeeded(OpName::Mount, Some(&pod));
        assert_eq!(backoffs.until(OpName::Mount, Some(&pod)), None, "its stage is there");
        assert_eq!(backoffs.until(OpName::Unmount, Some(&pod)), Some(now + PAUSE.1));
    }

    #[test]
    fn pods_do_not_wait_for_each_other() {
        let (now, mut backoffs) = (Instant::now(), Backoffs::default());
        let (one, other) = (PodUid::from("a"), PodUid::from("b"));
        for op in [OpName::Mount, OpName::Unmount] {
            backoffs.failed(op, Some(&one), now);
            assert_eq!(backoffs.until(op, Some(&other)), None);
            assert_eq!(backoffs.failed(op, Some(&other), now), PAUSE.0, "from the beginning");
        }
        backoffs.forget(&one);
        backoffs.forget(&other);
        assert_eq!(backoffs, Backoffs::default());
    }
}
