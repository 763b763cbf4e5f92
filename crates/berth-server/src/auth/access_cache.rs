//! Cache of SubjectAccessReview verdicts with single-flight reviews (spec 04 §6.4, §10).
//!
//! An aging positive verdict is refreshed in the background while it is still valid, so that frequent callers never
//! wait for the API server.

use std::{
    num::NonZeroUsize,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use lru::LruCache;
use serde_json::json;
use tokio::time::{Instant, timeout};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::debug;

use super::review_flights::{ReviewFlights, wait};
use crate::ports::{AccessRequest, AccessReviewer, ReviewError};

/// Timeout of a review.
const REVIEW_LIMIT: Duration = Duration::from_secs(30);
/// Capacity of the cache.
const REMEMBERED: NonZeroUsize = NonZeroUsize::new(8192).expect("not zero");
/// Maximum length of a cached key, in bytes; longer requests are not cached.
const LONGEST: usize = 10_000;
/// Maximum number of concurrent reviews; beyond it, authorization fails.
const REVIEWS: usize = 256;

/// Lifetime of cached verdicts.
#[derive(Clone, Copy, Debug)]
pub struct AccessTtls {
    /// Lifetime of a positive verdict.
    pub authorized: Duration,
    /// Lifetime of a negative verdict.
    pub unauthorized: Duration,
    /// How much longer a positive verdict for [`MONITORING_SUBRESOURCES`] remains usable while reviews fail; zero disables it.
    pub stale: Duration,
}

/// Subresources for which node monitoring matters more than a fresh verdict.
pub const MONITORING_SUBRESOURCES: [&str; 2] = ["healthz", "metrics"];

/// Whether the access is allowed, or why that is unknown.
pub type Decision = Result<bool, String>;

/// Cache of access verdicts.
pub struct AccessCache {
    reviewer: Arc<dyn AccessReviewer>,
    ttls: AccessTtls,
    memory: Mutex<LruCache<String, AccessCacheEntry>>,
    flights: ReviewFlights<String, Decision>,
}

#[derive(Clone, Copy)]
struct AccessCacheEntry {
    allowed: bool,
    /// Time from which a positive verdict is refreshed.
    stale: Instant,
    until: Instant,
}

impl AccessCache {
    /// Creates an empty cache. Reviews run as tasks of `tasks` and are canceled by `stop`.
    pub fn new(
        reviewer: Arc<dyn AccessReviewer>,
        ttls: AccessTtls,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Arc<Self> {
        let memory = Mutex::new(LruCache::new(REMEMBERED));
        Arc::new(Self { reviewer, ttls, memory, flights: ReviewFlights::new(REVIEWS, tasks, stop) })
    }

    /// Returns the cached verdict, or reviews the request.
    ///
    /// # Errors
    /// Why the verdict is unknown.
    pub async fn decide(self: &Arc<Self>, request: AccessRequest) -> Decision {
        let key = key(&request);
        let now = Instant::now();
        let known = self.memory().get(&key).copied().filter(|entry| now < entry.until);
        if let Some(entry) = known {
            if entry.allowed && now >= entry.stale {
                // Background refresh; if the limit of reviews is reached, a later request retries.
                let _ = self.flights.start(&key, self.clone().review(key.clone(), request));
            }
            return Ok(entry.allowed);
        }
        let is_monitoring = MONITORING_SUBRESOURCES.contains(&request.subresource.as_str());
        let decision = match self.flights.start(&key, self.clone().review(key.clone(), request)) {
            Ok(answer) => wait(answer).await.unwrap_or_else(|| Err("authorization review was interrupted".to_owned())),
            Err(_) => Err(format!("too many authorization reviews in progress: limit is {REVIEWS}")),
        };
        match decision {
            Err(why) if is_monitoring && self.is_stale_allowed(&key) => {
                debug!(err = why, "Authorization review failed, using expired cached decision");
                Ok(true)
            }
            decision => decision,
        }
    }

    /// Whether an expired positive verdict is still within its stale period.
    fn is_stale_allowed(&self, key: &String) -> bool {
        let now = Instant::now();
        self.memory().get(key).is_some_and(|entry| entry.allowed && now < entry.until + self.ttls.stale)
    }

    async fn review(self: Arc<Self>, key: String, request: AccessRequest) -> Decision {
        let late = |_| Err(ReviewError(format!("no response within {REVIEW_LIMIT:?}")));
        let verdict = timeout(REVIEW_LIMIT, self.reviewer.review(&request)).await.unwrap_or_else(late);
        let verdict = verdict.map_err(|ReviewError(why)| why)?;
        if verdict.allowed && verdict.denied {
            self.memory().pop(&key); // a definite response ends the stale period
            return Err("webhook subject access review returned both allow and deny response".to_owned());
        }
        self.remember(key, verdict.allowed);
        Ok(verdict.allowed)
    }

    fn remember(&self, key: String, allowed: bool) {
        let ttl = if allowed { self.ttls.authorized } else { self.ttls.unauthorized };
        if !ttl.is_zero() && key.len() < LONGEST {
            let now = Instant::now();
            self.memory().put(key, AccessCacheEntry { allowed, stale: now + ttl * 4 / 5, until: now + ttl });
        }
    }

    fn memory(&self) -> MutexGuard<'_, LruCache<String, AccessCacheEntry>> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Cache key; JSON, so that no value can be mistaken for two.
fn key(request: &AccessRequest) -> String {
    let AccessRequest { identity, verb, subresource, node } = request;
    json!([verb, subresource, node, identity.name, identity.uid, identity.groups, identity.extra]).to_string()
}

#[cfg(test)]
mod tests;
