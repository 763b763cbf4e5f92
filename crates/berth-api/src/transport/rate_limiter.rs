//! Client-side rate limiter: one token bucket per request class (spec 10 §2.1, 01 §10.3).
//!
//! First come, first served. Watches are not limited.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::{Instant, sleep_until};
use tracing::info;

use crate::api::{RequestClass, Resource};
use berth_sys::token_bucket::TokenBucket;

/// Wait from which on a request is logged.
const LONG: Duration = Duration::from_secs(1);
/// Minimum interval of that log line.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Rate limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rate {
    /// No limit.
    Unlimited,
    /// Token bucket.
    Limited {
        /// Requests per second.
        qps: u32,
        /// Size of the bucket.
        burst: u32,
    },
}

impl Rate {
    /// Rate limit as client-go interprets the values: a `qps` of 0 is 5, a `burst` of 0 or less is 10; a negative `qps`
    /// is unlimited.
    pub fn of(qps: i32, burst: i32) -> Self {
        let or = |value: i32, default| u32::try_from(value).ok().filter(|value| *value > 0).unwrap_or(default);
        match qps {
            ..0 => Self::Unlimited,
            qps => Self::Limited { qps: or(qps, 5), burst: or(burst, 10) },
        }
    }

    /// Rate limit of events, as the configuration's documentation defines it: 0 is unlimited (spec 05 §13.1).
    pub fn of_events(qps: i32, burst: i32) -> Self {
        if qps == 0 { Self::Unlimited } else { Self::of(qps, burst) }
    }
}

/// Which requests share the main rate limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RateLimitScope {
    /// All requests share one bucket.
    #[default]
    All,
    /// Each API group has a bucket of its own: where the main rate is not configured (spec 01 §10.3).
    Groups,
}

impl RateLimitScope {
    /// Sharing that follows from the configured main rate.
    pub fn of(qps: i32) -> Self {
        if qps == 0 { Self::Groups } else { Self::All }
    }
}

impl Default for Rate {
    fn default() -> Self {
        Self::of(50, 100)
    }
}

/// Rate limits by request class; heartbeats have none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// Requests that belong to no other class.
    pub main: Rate,
    /// Which requests share the main rate limit.
    pub sharing: RateLimitScope,
    /// Limit of event writes, from `eventRecordQPS` and `eventBurst`.
    pub events: Rate,
    /// Certificate signing requests; `None`: they share the main rate limit.
    pub certificates: Option<Rate>,
}

/// Key of a bucket: request class, and API group if the main rate is per group.
type BucketKey = (RequestClass, &'static str);

/// Client-side rate limiter with a token bucket per request class, or per API group.
#[derive(Debug)]
pub struct RateLimiter {
    rates: Rates,
    buckets: Mutex<HashMap<BucketKey, TokenBucket>>,
    last_logged: Mutex<Option<Instant>>,
}

impl RateLimiter {
    /// Returns a limiter with full buckets.
    pub fn new(rates: Rates) -> Self {
        Self { rates, buckets: Mutex::default(), last_logged: Mutex::new(None) }
    }

    /// Bucket and rate of a request; `None` for heartbeats.
    fn bucket(&self, line: RequestClass, resource: &Resource) -> Option<(BucketKey, Rate)> {
        let group = if self.rates.sharing == RateLimitScope::Groups { resource.group } else { "" };
        let main = ((RequestClass::Main, group), self.rates.main);
        match line {
            RequestClass::Heartbeat => None,
            RequestClass::Main => Some(main),
            RequestClass::Events => Some(((line, ""), self.rates.events)),
            RequestClass::Certificates => Some(self.rates.certificates.map_or(main, |rate| ((line, ""), rate))),
        }
    }

    /// Waits for a token; logs a long wait with the resource of the request.
    ///
    /// # Errors
    /// The token would come after `latest`; it is not taken then.
    pub async fn acquire(
        &self,
        line: RequestClass,
        latest: Instant,
        resource: &Resource,
    ) -> Result<(), DeadlineExceeded> {
        let Some((whose, rate)) = self.bucket(line, resource) else { return Ok(()) };
        let Rate::Limited { qps, burst } = rate else { return Ok(()) };
        let now = Instant::now();
        let wait = {
            let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
            let full = || TokenBucket::per_second(qps, burst, now.into_std());
            let longest = latest.checked_duration_since(now).ok_or(DeadlineExceeded)?;
            buckets.entry(whose).or_insert_with(full).reserve(now.into_std(), longest).ok_or(DeadlineExceeded)?
        };
        if !wait.is_zero() {
            sleep_until(now + wait).await;
        }
        if wait > LONG && self.should_log(now) {
            info!(delay = ?wait, request = resource.plural, "Waited before sending request");
        }
        Ok(())
    }

    fn should_log(&self, now: Instant) -> bool {
        let mut last_logged = self.last_logged.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = last_logged.is_none_or(|last| now.duration_since(last) >= LOG_INTERVAL);
        if is_due {
            *last_logged = Some(now);
        }
        is_due
    }
}

/// The token would come after the deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeadlineExceeded;

#[cfg(test)]
mod tests {
    use super::*;

    const PODS: &Resource = &Resource::PODS;

    #[test]
    fn nothing_is_no_freedom() {
        let limited = |qps, burst| Rate::Limited { qps, burst };
        for (qps, burst, main, events) in [
            (0, 0, limited(5, 10), Rate::Unlimited),
            (0, 7, limited(5, 7), Rate::Unlimited),
            (3, 0, limited(3, 10), limited(3, 10)),
            (50, 100, Rate::default(), Rate::default()),
            (-1, 7, Rate::Unlimited, Rate::Unlimited),
        ] {
            assert_eq!((Rate::of(qps, burst), Rate::of_events(qps, burst)), (main, events), "{qps} {burst}");
        }
        assert_eq!(
            (RateLimitScope::of(0), RateLimitScope::of(50), RateLimitScope::of(-1)),
            (RateLimitScope::Groups, RateLimitScope::All, RateLimitScope::All)
        );
    }

    async fn took(pace: &RateLimiter, line: RequestClass, turns: u32) -> Vec<u128> {
        let (begun, mut took) = (Instant::now(), Vec::new());
        for _ in 0..turns {
            pace.acquire(line, begun + LONG, PODS).await.expect("in time");
            took.push((begun.elapsed().as_millis() + 50) / 100);
        }
        took
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_burst_it_goes_slowly() {
        let pace = RateLimiter::new(Rates { main: Rate::of(10, 3), ..Rates::default() });
        assert_eq!(took(&pace, RequestClass::Main, 6).await, [0, 0, 0, 1, 2, 3]);
        tokio::time::advance(Duration::from_secs(10)).await;
        assert_eq!(took(&pace, RequestClass::Main, 3).await, [0, 0, 0], "a pause fills the bucket");
        let pace = RateLimiter::new(Rates { main: Rate::of(-1, 1), ..Rates::default() });
        assert_eq!(took(&pace, RequestClass::Main, 1000).await.last(), Some(&0));
    }

    #[tokio::test(start_paused = true)]
    async fn lines_do_not_wait_for_each_other() {
        let slow = Rate::of(1, 1);
        let pace = RateLimiter::new(Rates { main: slow, events: slow, ..Rates::default() });
        let latest = Instant::now();
        for line in [RequestClass::Main, RequestClass::Events, RequestClass::Heartbeat, RequestClass::Heartbeat] {
            assert_eq!(pace.acquire(line, latest, PODS).await, Ok(()), "{line:?}");
        }
        assert_eq!(pace.acquire(RequestClass::Main, latest, PODS).await, Err(DeadlineExceeded));
        assert_eq!(
            pace.acquire(RequestClass::Main, latest, &Resource::LEASES).await,
            Err(DeadlineExceeded),
            "all groups share one"
        );
        assert_eq!(
            pace.acquire(RequestClass::Certificates, latest, PODS).await,
            Err(DeadlineExceeded),
            "it is the main one's"
        );
        tokio::time::advance(LONG).await;
        assert_eq!(
            pace.acquire(RequestClass::Certificates, Instant::now(), PODS).await,
            Ok(()),
            "what was late took no turn"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn groups_may_have_a_rate_each() {
        let pace =
            RateLimiter::new(Rates { main: Rate::of(1, 1), sharing: RateLimitScope::Groups, ..Rates::default() });
        let latest = Instant::now();
        for resource in [PODS, &Resource::LEASES, &Resource::CSI_NODES] {
            assert_eq!(pace.acquire(RequestClass::Main, latest, resource).await, Ok(()), "{resource:?}");
            assert_eq!(pace.acquire(RequestClass::Main, latest, resource).await, Err(DeadlineExceeded), "{resource:?}");
        }
        assert_eq!(
            pace.acquire(RequestClass::Main, latest, &Resource::SECRETS).await,
            Err(DeadlineExceeded),
            "of the group of pods"
        );
    }
}
