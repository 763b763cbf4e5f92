//! When an operation on a volume that failed may be tried again. Pure. Behaviour: spec 07 §3.1, §3.5.
//!
//! Each operation has its own pauses, by its name and by the pod it failed for: one of another name does not wait for
//! it, and neither does another pod. Pauses double until the operation succeeds, whatever else was tried in between: two
//! that fail in turns would otherwise never come to rest. What failed for the whole volume (its stage) pauses for all.

use std::time::{Duration, Instant};

use berth_types::PodUid;

/// First and longest pause.
const PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(122));

/// What is done, by the name that metrics know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpName {
    /// Staged where that is due, and given to a pod.
    Mount,
    /// The same as a device.
    Map,
    /// Taken from a pod.
    Unmount,
    /// The same as a device.
    Unmap,
    /// Unstaged.
    UnmountDevice,
    /// The same as a device.
    UnmapDevice,
    /// Expanded.
    Resize,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Record {
    op: OpName,
    /// `None` for what failed for all pods.
    pod: Option<PodUid>,
    until: Instant,
    pause: Duration,
}

/// What failed on one volume.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Backoffs(Vec<Record>);

impl Record {
    fn concerns(&self, op: OpName, pod: Option<&PodUid>) -> bool {
        self.op == op && (self.pod.is_none() || self.pod.as_ref() == pod)
    }
}

impl Backoffs {
    /// From when on it may run; `None` for at once.
    pub fn until(&self, op: OpName, pod: Option<&PodUid>) -> Option<Instant> {
        self.0.iter().filter(|record| record.concerns(op, pod)).map(|record| record.until).max()
    }

    /// It failed, for that pod or for all; how long it pauses now. Where it failed for one pod, it got beyond what it
    /// failed at for all.
    pub fn failed(&mut self, op: OpName, pod: Option<&PodUid>, now: Instant) -> Duration {
        let last = self.0.iter().filter(|record| record.concerns(op, pod)).map(|record| record.pause).max();
        let pause = last.map_or(PAUSE.0, |last| (last * 2).min(PAUSE.1));
        self.succeeded(op, pod);
        self.0.push(Record { op, pod: pod.cloned(), until: now + pause, pause });
        pause
    }

    /// It went well for that pod, and so does what all pods need of it.
    pub fn succeeded(&mut self, op: OpName, pod: Option<&PodUid>) {
        self.0.retain(|record| !record.concerns(op, pod));
    }

    /// What made things fail may be over: everything is tried at once, and pauses longer if that fails.
    pub fn cured(&mut self, now: Instant) {
        self.0.iter_mut().for_each(|record| record.until = now);
    }

    /// The pod is gone.
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
