//! Token bucket rate limiter of image pulls (spec 03b §1.1 "registryPullQPS"). Pure.

use std::time::Instant;

/// Token bucket that refills at a constant rate, up to a burst.
#[derive(Clone, Debug)]
pub struct Bucket {
    per_second: f64,
    burst: f64,
    tokens: f64,
    filled: Instant,
}

impl Bucket {
    /// Creates a full bucket. `qps` 0 means no limit.
    pub fn new(qps: u32, burst: u32, now: Instant) -> Self {
        let burst = f64::from(burst);
        Self { per_second: f64::from(qps), burst, tokens: burst, filled: now }
    }

    /// Takes a token; returns whether one was available.
    pub fn take(&mut self, now: Instant) -> bool {
        if self.per_second == 0.0 {
            return true;
        }
        let elapsed = now.saturating_duration_since(self.filled).as_secs_f64();
        self.tokens = (self.tokens + elapsed * self.per_second).min(self.burst);
        self.filled = now;
        if self.tokens < 1.0 {
            return false;
        }
        self.tokens -= 1.0;
        true
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_burst_and_then_the_rate() {
        let start = Instant::now();
        let mut bucket = Bucket::new(5, 10, start);
        assert_eq!((0..12).filter(|_| bucket.take(start)).count(), 10);
        assert!(!bucket.take(start + Duration::from_millis(150)));
        assert!(bucket.take(start + Duration::from_millis(200)));
        assert!(!bucket.take(start + Duration::from_millis(250)));
        assert_eq!((0..20).filter(|_| bucket.take(start + Duration::from_secs(60))).count(), 10);
        let mut unlimited = Bucket::new(0, 0, start);
        assert!((0..1000).all(|_| unlimited.take(start)));
    }
}
