//! Token bucket rate limiter with reservations. Pure.

use std::time::{Duration, Instant};

/// A point in time on the clock of a [`TokenBucket`].
pub trait Moment: Copy {
    /// Time that passed since an earlier moment; zero if that one is later (a wall clock may be set back).
    fn since(self, earlier: Self) -> Duration;
}

impl Moment for Instant {
    fn since(self, earlier: Self) -> Duration {
        self.saturating_duration_since(earlier)
    }
}

/// Time since a fixed moment, such as the Unix epoch.
impl Moment for Duration {
    fn since(self, earlier: Self) -> Duration {
        self.saturating_sub(earlier)
    }
}

/// Token bucket: full at first, refilled by one token per interval, up to a burst.
///
/// Stores how long the refill takes instead of a number of tokens, so that arithmetic is exact. The clock is a parameter
/// of each call. Requests are served in the order of their calls.
#[derive(Clone, Debug)]
pub struct TokenBucket<T = Instant> {
    interval: Duration,
    burst: u32,
    /// Time from `filled` until the bucket is full; longer than `interval * burst` if tokens are reserved.
    missing: Duration,
    filled: T,
}

impl<T: Moment> TokenBucket<T> {
    /// Creates a full bucket that regains a token every `interval`. A `burst` of 0 refuses every request.
    pub const fn new(interval: Duration, burst: u32, now: T) -> Self {
        Self { interval, burst, missing: Duration::ZERO, filled: now }
    }

    /// Creates a full bucket that regains `rate` tokens per second; a rate of 0 counts as 1.
    pub fn per_second(rate: u32, burst: u32, now: T) -> Self {
        Self::new(Duration::from_secs(1) / rate.max(1), burst, now)
    }

    /// Takes a token; returns whether there was one.
    pub fn try_take(&mut self, now: T) -> bool {
        self.reserve(now, Duration::ZERO).is_some()
    }

    /// Takes the next token, and returns how long to wait for it; `None` if that is longer than `longest`: the token is
    /// not taken then.
    pub fn reserve(&mut self, now: T, longest: Duration) -> Option<Duration> {
        self.missing = self.missing.saturating_sub(now.since(self.filled));
        self.filled = now;
        let saved = self.interval.saturating_mul(self.burst.checked_sub(1)?);
        let wait = self.missing.saturating_sub(saved);
        if wait > longest {
            return None;
        }
        self.missing = self.missing.saturating_add(self.interval);
        Some(wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_burst_and_then_the_rate() {
        let start = Instant::now();
        let mut bucket = TokenBucket::per_second(5, 10, start);
        assert_eq!((0..12).filter(|_| bucket.try_take(start)).count(), 10);
        assert!(!bucket.try_take(start + Duration::from_millis(150)));
        assert!(bucket.try_take(start + Duration::from_millis(200)));
        assert!(!bucket.try_take(start + Duration::from_millis(250)));
        assert_eq!((0..20).filter(|_| bucket.try_take(start + Duration::from_secs(60))).count(), 10);
    }

    #[test]
    fn reservations_are_served_in_order_and_within_their_limit() {
        let start = Instant::now();
        let mut bucket = TokenBucket::new(SECOND, 2, start);
        let waits: Vec<_> = (0..5).map(|_| bucket.reserve(start, 2 * SECOND)).collect();
        let seconds = |n: u32| Some(n * SECOND);
        assert_eq!(waits, [seconds(0), seconds(0), seconds(1), seconds(2), None]);
        let later = start + SECOND;
        assert_eq!(bucket.reserve(later, SECOND), None, "two are still reserved");
        assert_eq!(bucket.reserve(later, 2 * SECOND), seconds(2), "a refused reservation took no token");
    }

    #[tokio::test(start_paused = true)]
    async fn reserved_waits_keep_the_rate() {
        let now = || tokio::time::Instant::now().into_std();
        let (start, mut bucket) = (now(), TokenBucket::per_second(10, 3, now()));
        let mut served = Vec::new();
        for _ in 0..6 {
            let wait = bucket.reserve(now(), SECOND).expect("within a second");
            tokio::time::sleep(wait).await;
            served.push((now() - start).as_millis());
        }
        let near = [0, 0, 0, 100, 200, 300];
        assert!(served.iter().zip(near).all(|(at, near)| at.abs_diff(near) <= 5), "{served:?}");
    }

    #[test]
    fn a_clock_set_back_neither_fills_nor_empties() {
        let (late, early) = (1000 * SECOND, 10 * SECOND);
        let mut bucket = TokenBucket::new(SECOND, 3, late);
        assert!(bucket.try_take(late));
        assert_eq!((0..9).filter(|_| bucket.try_take(early)).count(), 2);
        assert!(!bucket.try_take(early + Duration::from_millis(999)));
        assert!(bucket.try_take(early + SECOND), "refilled by the new time");
    }

    #[test]
    fn without_a_burst_nothing_is_let_through() {
        let start = Instant::now();
        let mut bucket = TokenBucket::new(SECOND, 0, start);
        assert!(!bucket.try_take(start + SECOND));
        assert_eq!(bucket.reserve(start, 100 * SECOND), None);
        let mut huge = TokenBucket::new(Duration::MAX, u32::MAX, start);
        assert!(huge.try_take(start) && huge.try_take(start), "no overflow");
    }
}
