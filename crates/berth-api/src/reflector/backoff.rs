//! Back-off of failed watches and lists. Pure.
//!
//! Times are durations since some fixed moment. Implements spec 10 §3.2, §7.

use std::time::Duration;

use berth_sys::backoff::Backoff;

/// Delays after failures; the jitter may double them.
const DELAYS: Backoff = Backoff::new(Duration::from_millis(800), Duration::from_secs(30)).with_jitter(1.0, 2.0);
/// Time without failures after which the back-off is reset.
const FORGET: Duration = Duration::from_secs(120);
/// Delays while the node authorizer lags.
const QUICK: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(1));
/// How long a refusal is attributed to that lag.
const QUICK_FOR: Duration = Duration::from_secs(10);

/// Back-off of one reflector. Counts only, because a node runs thousands of reflectors.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct WatchBackoff {
    doublings: u32,
    /// When the last back-off ended.
    used: Option<Duration>,
}

impl WatchBackoff {
    /// Next back-off; `chance` is uniform in 0..1.
    pub fn pause(&mut self, now: Duration, chance: f64) -> Duration {
        if self.used.is_some_and(|used| now.saturating_sub(used) > FORGET) {
            self.doublings = 0;
        }
        let pause = DELAYS.nth_with(self.doublings, chance);
        self.doublings = self.doublings.saturating_add(1);
        self.used = Some(now.saturating_add(pause));
        pause
    }
}

/// Short back-off for a node to which a pod was bound so recently that it may not read the objects the pod references:
/// the node authorizer has not observed the pod yet (spec 10 §6.1).
#[derive(Clone, PartialEq, Debug, Default)]
pub struct QuickRetry {
    since: Option<Duration>,
    doublings: u32,
}

impl QuickRetry {
    /// Next back-off; `None` once the refusal has lasted longer than the authorizer's lag.
    pub fn pause(&mut self, now: Duration) -> Option<Duration> {
        let since = *self.since.get_or_insert(now);
        if now.saturating_sub(since) >= QUICK_FOR {
            return None;
        }
        let pause = QUICK.nth(self.doublings);
        self.doublings = self.doublings.saturating_add(1);
        Some(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn pauses_double_to_their_end_and_are_forgotten() {
        let mut backoff = WatchBackoff::default();
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
