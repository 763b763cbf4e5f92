//! Exponential back-off with a cap and jitter, for all retry loops of the agent.

use std::time::Duration;

/// Exponential back-off: delays grow from a base by a factor up to a cap.
///
/// Jitter multiplies a delay after the cap was applied, so that it also spreads the longest delays. A value is small and
/// `Copy`: a `const` describes the policy, and each retry loop or each key counts in its own copy.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Backoff {
    base: Duration,
    cap: Duration,
    factor: f64,
    /// Lowest and highest multiplier of a delay.
    jitter: (f64, f64),
    /// Number of delays taken since the last reset.
    taken: u32,
}

impl Backoff {
    /// Creates a back-off that doubles from `base` up to `cap`, without jitter.
    pub const fn new(base: Duration, cap: Duration) -> Self {
        Self { base, cap, factor: 2.0, jitter: (1.0, 1.0), taken: 0 }
    }

    /// Sets the growth factor.
    #[must_use]
    pub const fn with_factor(self, factor: f64) -> Self {
        Self { factor, ..self }
    }

    /// Multiplies each delay by a random number between `low` and `high`.
    #[must_use]
    pub const fn with_jitter(self, low: f64, high: f64) -> Self {
        Self { jitter: (low, high), ..self }
    }

    /// The delay after `n` others, without jitter; does not depend on the delays taken.
    pub fn nth(&self, n: u32) -> Duration {
        if self.base.is_zero() {
            return self.base;
        }
        let grown = self.base.as_secs_f64() * self.factor.powi(i32::try_from(n).unwrap_or(i32::MAX));
        Duration::try_from_secs_f64(grown).map_or(self.cap, |grown| grown.min(self.cap))
    }

    /// The delay after `n` others, with jitter; `chance` is uniform in 0..1.
    pub fn nth_with(&self, n: u32, chance: f64) -> Duration {
        let (low, high) = self.jitter;
        let seconds = self.nth(n).as_secs_f64() * (low + (high - low) * chance.clamp(0.0, 1.0));
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }

    /// The next delay without jitter, without taking it.
    pub fn peek(&self) -> Duration {
        self.nth(self.taken)
    }

    /// Takes the next delay.
    pub fn next_delay(&mut self) -> Duration {
        self.next_with(rand::random())
    }

    /// Takes the next delay; `chance` is uniform in 0..1 and determines the jitter.
    pub fn next_with(&mut self, chance: f64) -> Duration {
        let delay = self.nth_with(self.taken, chance);
        self.taken = self.taken.saturating_add(1);
        delay
    }

    /// Starts again at the base, after a success.
    pub fn reset(&mut self) {
        self.taken = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn millis(mut backoff: Backoff, chance: f64, count: usize) -> Vec<u128> {
        std::iter::repeat_with(|| backoff.next_with(chance).as_millis()).take(count).collect()
    }

    #[test]
    fn delays_grow_by_the_factor_up_to_the_cap() {
        let doubling = Backoff::new(Duration::from_millis(800), Duration::from_secs(30));
        assert_eq!(millis(doubling, 0.3, 8), [800, 1600, 3200, 6400, 12_800, 25_600, 30_000, 30_000]);
        let slower = Backoff::new(Duration::from_millis(100), Duration::from_secs(3)).with_factor(1.6);
        assert_eq!(millis(slower, 0.3, 9), [100, 160, 256, 409, 655, 1048, 1677, 2684, 3000]);
        let constant = Backoff::new(Duration::from_secs(5), Duration::from_secs(1));
        assert_eq!(millis(constant, 0.3, 2), [1000, 1000], "a base above the cap");
    }

    #[test]
    fn jitter_spreads_every_delay_and_never_exceeds_its_bounds() {
        let backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(4)).with_jitter(0.8, 1.2);
        assert_eq!(millis(backoff, 0.0, 4), [800, 1600, 3200, 3200]);
        assert_eq!(millis(backoff, 7.0, 4), [1200, 2400, 4800, 4800], "a chance above 1 counts as 1");
        let mut drawn = backoff;
        for n in 0..100 {
            let (delay, plain) = (drawn.next_delay(), backoff.nth(n));
            assert!(delay >= plain.mul_f64(0.8) && delay <= plain.mul_f64(1.2), "{n}: {delay:?}");
        }
    }

    #[test]
    fn a_reset_starts_again_at_the_base() {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
        assert_eq!((backoff.next_delay(), backoff.next_delay()), (Duration::from_secs(1), Duration::from_secs(2)));
        assert_eq!(backoff.peek(), Duration::from_secs(4));
        assert_eq!(backoff.peek(), Duration::from_secs(4), "not taken");
        backoff.reset();
        assert_eq!(backoff.next_delay(), Duration::from_secs(1));
    }

    #[test]
    fn any_number_of_failures_is_the_cap() {
        let backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(10));
        assert_eq!([0, 5, 6, 40, u32::MAX].map(|n| backoff.nth(n).as_millis()), [200, 6400, 10_000, 10_000, 10_000]);
        let unlimited = Backoff::new(Duration::from_secs(1), Duration::MAX);
        assert_eq!(unlimited.nth(u32::MAX), Duration::MAX);
        assert_eq!(
            [3, u32::MAX].map(|n| Backoff::new(Duration::ZERO, Duration::from_secs(1)).nth(n)),
            [Duration::ZERO; 2]
        );
        assert_eq!(unlimited.with_jitter(1.0, 1.2).nth_with(u32::MAX, 1.0), Duration::MAX, "no overflow");
    }
}
