//! When an operation on a volume that failed may be tried again. Pure. Behaviour: spec 07 §3.1, §3.5.
//!
//! What an operation holds is a volume, or a volume and a pod. An operation of another name on the same
//! does not wait: what failed is another matter then.

use std::time::{Duration, Instant};

use crate::pod::PodUid;

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
    /// `None` for what holds the whole volume.
    pod: Option<PodUid>,
    until: Instant,
    pause: Duration,
}

/// What failed on one volume.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Backoffs(Vec<Record>);

impl Backoffs {
    /// From when on it may run; `None` for at once.
    pub fn until(&self, op: OpName, pod: Option<&PodUid>) -> Option<Instant> {
        self.find(pod).filter(|record| record.op == op).map(|record| record.until)
    }

    /// It failed; how long it pauses now.
    pub fn failed(&mut self, op: OpName, pod: Option<&PodUid>, now: Instant) -> Duration {
        let last = self.find(pod).filter(|record| record.op == op).map(|record| record.pause);
        let pause = last.map_or(PAUSE.0, |last| (last * 2).min(PAUSE.1));
        self.succeeded(pod);
        self.0.push(Record { op, pod: pod.cloned(), until: now + pause, pause });
        pause
    }

    /// It went well.
    pub fn succeeded(&mut self, pod: Option<&PodUid>) {
        if let Some(found) = self.find(pod).cloned() {
            self.0.retain(|record| *record != found);
        }
    }

    /// What made things fail may be over: everything is tried at once, and pauses as long as before if that fails.
    pub fn cured(&mut self, now: Instant) {
        self.0.iter_mut().for_each(|record| record.until = now);
    }

    /// The pod is gone.
    pub fn forget(&mut self, pod: &PodUid) {
        self.0.retain(|record| record.pod.as_ref() != Some(pod));
    }

    /// The record of the same key, else one whose key covers it.
    fn find(&self, pod: Option<&PodUid>) -> Option<&Record> {
        let exact = self.0.iter().find(|record| record.pod.as_ref() == pod);
        exact.or_else(|| self.0.iter().find(|record| record.pod.is_none() || pod.is_none()))
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
        backoffs.succeeded(None);
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
        backoffs.failed(OpName::Unmount, Some(&pod), now);
        assert_eq!(backoffs.until(OpName::Mount, None), None, "what failed last is another matter");
        assert_eq!(backoffs.failed(OpName::Mount, None, now), PAUSE.0, "from the beginning");
    }

    #[test]
    fn pods_do_not_wait_for_each_other() {
        let (now, mut backoffs) = (Instant::now(), Backoffs::default());
        let (one, other) = (PodUid::from("a"), PodUid::from("b"));
        backoffs.failed(OpName::Unmount, Some(&one), now);
        assert_eq!(backoffs.until(OpName::Unmount, Some(&other)), None);
        backoffs.forget(&one);
        assert_eq!(backoffs, Backoffs::default());
    }
}
