//! How long to wait after a failure. Pure. Spec 10 §3.2, §7.
//!
//! Time is given as what has passed since some fixed moment.

use std::time::Duration;

/// First and longest pause, before the jitter that may double it.
const PAUSE: (Duration, Duration) = (Duration::from_millis(800), Duration::from_secs(30));
/// Without use for so long, the next pause is the first again.
const FORGET: Duration = Duration::from_secs(120);
/// First and longest pause of who is not yet known to the authorizer.
const QUICK: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// For how long that is taken for the reason.
const QUICK_FOR: Duration = Duration::from_secs(10);

/// Pauses that double, jittered.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Backoff {
    doublings: u32,
    /// When the last pause ended.
    used: Option<Duration>,
}

impl Backoff {
    /// The next pause; `chance` is uniform in 0..1.
    pub fn pause(&mut self, now: Duration, chance: f64) -> Duration {
        if self.used.is_some_and(|used| now.saturating_sub(used) > FORGET) {
            self.doublings = 0;
        }
        let pause = doubled(PAUSE, self.doublings).mul_f64(1.0 + chance.clamp(0.0, 1.0));
        self.doublings = self.doublings.saturating_add(1);
        self.used = Some(now.saturating_add(pause));
        pause
    }
}

/// Short pauses for a node that was bound a pod so recently that it may not read what the pod
/// refers to: the authorizer has not heard of it (spec 10 §6.1).
#[derive(Clone, PartialEq, Debug, Default)]
pub struct QuickRetry {
    since: Option<Duration>,
    doublings: u32,
}

impl QuickRetry {
    /// The next pause; `None` once it has taken too long to be the authorizer's delay.
    pub fn pause(&mut self, now: Duration) -> Option<Duration> {
        let since = *self.since.get_or_insert(now);
        if now.saturating_sub(since) >= QUICK_FOR {
            return None;
        }
        let pause = doubled(QUICK, self.doublings);
        self.doublings = self.doublings.saturating_add(1);
        Some(pause)
    }
}

fn doubled((first, longest): (Duration, Duration), times: u32) -> Duration {
    first.saturating_mul(2_u32.saturating_pow(times.min(16))).min(longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn pauses_double_to_their_end_and_are_forgotten() {
        let mut backoff = Backoff::default();
        let mut now = at(0);
        let mut seen = Vec::new();
        for _ in 0..8 {
            let pause = backoff.pause(now, 0.0);
            now += pause;
            seen.push(pause.as_millis());
        }
        assert_eq!(seen, [800, 1600, 3200, 6400, 12800, 25600, 30000, 30000]);
        assert_eq!(backoff.pause(now + at(120), 0.5), at(45), "not yet forgotten, jittered");
        assert_eq!(backoff.pause(now + at(120) + at(45) + at(121), 0.0).as_millis(), 800, "forgotten");
    }

    #[test]
    fn the_authorizer_is_waited_for_a_while() {
        let mut quick = QuickRetry::default();
        let mut now = at(7);
        let mut seen = Vec::new();
        while let Some(pause) = quick.pause(now) {
            now += pause;
            seen.push(pause.as_millis());
        }
        assert_eq!(seen[..6], [50, 100, 200, 400, 800, 1000]);
        assert!(now >= at(17) && now < at(19), "{now:?}");
        assert_eq!(quick.pause(now + at(100)), None);
    }
}
