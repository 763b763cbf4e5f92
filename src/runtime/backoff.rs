//! Crash loop back-off: delay before a crashed container may be restarted. Pure.
//!
//! Delays are 0, then the initial delay, doubling up to the maximum, counted from the time the
//! container finished; an entry is reset when the container ran for ten minutes. The key includes image
//! and resources, so that a corrected definition starts at once (spec 03a §8).
//!
//! Runtimes report finish times by the wall clock, which administrators and NTP adjust. Once a delay
//! has been computed for a finish time it is kept on the monotonic clock, and no wait exceeds its
//! delay, whatever the wall clock does.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use jiff::{SignedDuration, Timestamp};

use berth_sys::backoff::Backoff;
use berth_types::{Pod, PodUid, api, hash};

/// How long a container has to run for its back-off to be reset.
pub const FORGET_AFTER: Duration = Duration::from_secs(600);

/// Identity of a back-off: pod UID and a hash of the container's definition.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct BackoffKey {
    pod: PodUid,
    shape: u64,
}

impl BackoffKey {
    /// The key of one container of a pod.
    pub fn of(pod: &Pod, container: &api::Container) -> Self {
        let resources = serde_json::to_string(&container.resources).unwrap_or_default();
        let image = container.image.as_deref().unwrap_or_default();
        let text = [pod.name(), pod.namespace(), &container.name, image, &resources].join("\u{0}");
        Self { pod: pod.uid().clone(), shape: hash::fnv1a_64(text.as_bytes()) }
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
struct BackoffEntry {
    /// Its next delay is the one after the next crash.
    backoff: Backoff,
    updated: Timestamp,
    /// The finish time the last delay was computed for, and when that delay ends.
    wait: Option<(Timestamp, Instant)>,
}

/// The current time by both clocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Now {
    /// Wall clock, as runtimes report times.
    pub wall: Timestamp,
    /// Monotonic clock.
    pub steady: Instant,
}

/// Whether a container may be started now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StartDecision {
    /// It may be started; the next crash waits longer.
    Start,
    /// It must wait.
    Wait {
        /// The full delay.
        delay: Duration,
        /// End of the delay.
        until: Instant,
    },
}

/// Initial and maximum delay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BackoffLimits {
    /// Delay after the second crash.
    pub initial: Duration,
    /// Maximum delay.
    pub max: Duration,
}

impl BackoffLimits {
    /// Builds the limits from the gate `ReduceDefaultCrashLoopBackOffDecay` and
    /// `maxContainerRestartPeriod`.
    pub fn new(reduced: bool, configured_max: Option<Duration>) -> Self {
        let (initial, max) = if reduced { (1, 60) } else { (10, 300) };
        let max = configured_max.unwrap_or(Duration::from_secs(max));
        Self { initial: Duration::from_secs(initial).min(max), max }
    }
}

impl Default for BackoffLimits {
    fn default() -> Self {
        Self::new(false, None)
    }
}

/// Crash loop back-offs of all containers.
#[derive(Debug)]
pub struct CrashBackoff {
    limits: BackoffLimits,
    entries: HashMap<BackoffKey, BackoffEntry>,
}

impl CrashBackoff {
    /// Creates an empty set of back-offs.
    pub fn new(limits: BackoffLimits) -> Self {
        Self { limits, entries: HashMap::new() }
    }

    /// Requests the start of a container whose newest exited instance finished at `finished`; if it may
    /// be started, the next delay is set.
    pub fn turn(&mut self, key: BackoffKey, finished: Timestamp, now: Now) -> StartDecision {
        let valid = self.entries.get_mut(&key).filter(|e| !older(e.updated, finished));
        let Some(entry) = valid else {
            let backoff = Backoff::new(self.limits.initial, self.limits.max);
            self.entries.insert(key, BackoffEntry { backoff, updated: now.wall, wait: None });
            return StartDecision::Start;
        };
        let delay = entry.backoff.peek();
        let until = match entry.wait {
            Some((end, until)) if end == finished => until,
            _ => now.steady + delay.saturating_sub(since(finished, now.wall)),
        };
        if now.steady < until {
            entry.wait = Some((finished, until));
            return StartDecision::Wait { delay, until };
        }
        entry.backoff.next_delay();
        *entry = BackoffEntry { updated: now.wall, wait: None, ..*entry };
        StartDecision::Start
    }

    /// Removes the back-offs of a pod.
    pub fn forget(&mut self, pod: &PodUid) {
        self.entries.retain(|key, _| key.pod != *pod);
    }

    /// Removes entries unused for longer than the maximum delay plus ten minutes.
    pub fn purge(&mut self, now: Timestamp) {
        let max = signed(self.limits.max);
        self.entries.retain(|_, entry| !older(entry.updated.checked_add(max).unwrap_or(entry.updated), now));
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

fn older(updated: Timestamp, at: Timestamp) -> bool {
    at.duration_since(updated) > signed(FORGET_AFTER)
}

/// Elapsed time; zero if the clock was set back.
fn since(past: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(past)).unwrap_or_default()
}

fn signed(duration: Duration) -> SignedDuration {
    SignedDuration::try_from(duration).unwrap_or(SignedDuration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_700_000_000 + seconds).expect("in range")
    }

    fn key(image: &str) -> BackoffKey {
        let object = serde_json::json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {"containers": [{"name": "c", "image": image}]},
        });
        let pod = Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete");
        BackoffKey::of(&pod, &pod.containers()[0])
    }

    /// Both clocks at that second, without clock adjustments.
    fn now(start: Instant, seconds: i64) -> Now {
        Now { wall: at(seconds), steady: start + Duration::from_secs(seconds.unsigned_abs()) }
    }

    /// Lets the container crash `runs` seconds after each start; returns the delays before each start.
    fn schedule(limits: BackoffLimits, runs: i64, times: usize) -> Vec<u64> {
        let (mut backoff, zero) = (CrashBackoff::new(limits), Instant::now());
        let mut finished = 0;
        (0..times)
            .map(|_| {
                let start = match backoff.turn(key("i"), at(finished), now(zero, finished)) {
                    StartDecision::Start => finished,
                    StartDecision::Wait { until, .. } => {
                        let start = i64::try_from((until - zero).as_secs()).expect("small");
                        assert_eq!(backoff.turn(key("i"), at(finished), now(zero, start)), StartDecision::Start);
                        start
                    }
                };
                let delay = start - finished;
                finished = start + runs;
                u64::try_from(delay).expect("never negative")
            })
            .collect()
    }

    #[test]
    fn delays_double_up_to_the_maximum() {
        assert_eq!(schedule(BackoffLimits::default(), 5, 8), [0, 10, 20, 40, 80, 160, 300, 300]);
        assert_eq!(schedule(BackoffLimits::new(true, None), 5, 8), [0, 1, 2, 4, 8, 16, 32, 60]);
        let short = BackoffLimits::new(false, Some(Duration::from_secs(3)));
        assert_eq!(schedule(short, 5, 4), [0, 3, 3, 3]);
    }

    #[test]
    fn a_third_crash_waits_twenty_seconds_from_its_finish() {
        // AC-03a-17
        let (mut backoff, zero) = (CrashBackoff::new(BackoffLimits::default()), Instant::now());
        assert_eq!(backoff.turn(key("i"), at(0), now(zero, 0)), StartDecision::Start);
        assert_eq!(backoff.turn(key("i"), at(5), now(zero, 15)), StartDecision::Start);
        let wait = StartDecision::Wait { delay: Duration::from_secs(20), until: now(zero, 40).steady };
        assert_eq!(backoff.turn(key("i"), at(20), now(zero, 21)), wait);
        assert_eq!(backoff.turn(key("i"), at(20), now(zero, 40)), StartDecision::Start);
    }

    #[test]
    fn a_clock_that_is_set_neither_lengthens_nor_ends_a_wait() {
        let second = Duration::from_secs(1);
        for hours in [-1, 1] {
            let (mut backoff, zero) = (CrashBackoff::new(BackoffLimits::default()), Instant::now());
            backoff.turn(key("i"), at(0), now(zero, 0));
            let wait = StartDecision::Wait { delay: second * 10, until: zero + second * 11 };
            assert_eq!(backoff.turn(key("i"), at(1), now(zero, 1)), wait);
            let set = |seconds: i64| Now { wall: at(seconds + hours * 3600), ..now(zero, seconds) };
            assert_eq!(backoff.turn(key("i"), at(1), set(2)), wait, "{hours}");
            assert_eq!(backoff.turn(key("i"), at(1), set(11)), StartDecision::Start, "{hours}");
        }
        let (mut backoff, zero) = (CrashBackoff::new(BackoffLimits::default()), Instant::now());
        backoff.turn(key("i"), at(3600), Now { wall: at(3600), ..now(zero, 0) });
        let wait = StartDecision::Wait { delay: second * 10, until: zero + second * 12 };
        assert_eq!(backoff.turn(key("i"), at(3601), now(zero, 2)), wait, "set back before it was asked about");
    }

    #[test]
    fn ten_minutes_of_running_well_are_forgiven() {
        assert_eq!(schedule(BackoffLimits::default(), 599, 4), [0, 10, 20, 40]);
        assert_eq!(schedule(BackoffLimits::default(), 601, 3), [0, 0, 0]);
    }

    #[test]
    fn another_image_starts_at_once_and_a_gone_pod_is_forgotten() {
        let (mut backoff, zero) = (CrashBackoff::new(BackoffLimits::default()), Instant::now());
        backoff.turn(key("i"), at(0), now(zero, 0));
        assert!(matches!(backoff.turn(key("i"), at(1), now(zero, 1)), StartDecision::Wait { .. }));
        assert_eq!(backoff.turn(key("j"), at(1), now(zero, 1)), StartDecision::Start);
        backoff.purge(at(300));
        assert_eq!(backoff.len(), 2);
        backoff.purge(at(2000));
        assert!(backoff.is_empty());
        backoff.turn(key("i"), at(0), now(zero, 0));
        backoff.forget(&"u".into());
        assert!(backoff.is_empty());
    }
}
