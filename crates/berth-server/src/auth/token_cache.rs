//! Cache of TokenReview verdicts, with a limit of concurrent reviews (spec 04 §6.2, §10).
//!
//! A verdict is cached for the TTL, a token that the API server calls invalid for 10 s: the API server reports those as
//! errors, and without a cache every invalid token would cost it a review. Failed reviews are not cached. Keys are
//! keyed hashes of the tokens.

use std::{
    net::IpAddr,
    num::NonZeroUsize,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use lru::LruCache;
use sha2::{Digest, Sha256};
use tokio::time::{Instant, timeout};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    identity::{AuthenticatedBy, UserInfo},
    review_flights::{Answer, ReviewFlights, wait},
    review_rate_limiter::ReviewRateLimiter,
};
use crate::ports::{ReviewError, TokenReviewer, TokenVerdict};
use berth_metrics::{AuthMetrics, Fetch, Lookup};

/// Timeout of a review.
const REVIEW_LIMIT: Duration = Duration::from_secs(30);
/// Minimum lifetime of a negative verdict.
const INVALID_TTL: Duration = Duration::from_secs(10);
/// Maximum number of concurrent reviews.
const REVIEWS: usize = 10;
/// Capacity for valid and for invalid tokens each: a flood of invalid ones does not evict valid ones.
const REMEMBERED: NonZeroUsize = NonZeroUsize::new(4096).expect("not zero");

type Key = [u8; 32];

/// Result of a lookup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenLookup {
    /// The token authenticates this user.
    Accepted(Arc<UserInfo>),
    /// Not authenticated, with the reason.
    Rejected(String),
    /// Unknown: the review failed.
    Failed(String),
    /// Unknown: too many reviews, in total or from this address.
    Busy,
}

/// Cache of token verdicts.
pub struct TokenCache {
    reviewer: Arc<dyn TokenReviewer>,
    ttl: Duration,
    metrics: AuthMetrics,
    hash_key: Key,
    memory: Mutex<TokenCacheState>,
    flights: ReviewFlights<Key, TokenLookup>,
}

struct TokenCacheState {
    accepted: LruCache<Key, (Instant, Arc<UserInfo>)>,
    rejected: LruCache<Key, (Instant, String)>,
    sources: ReviewRateLimiter,
}

impl TokenCache {
    /// Creates an empty cache. `ttl` is the lifetime of a verdict; reviews run as tasks of `tasks` and are canceled by
    /// `stop`.
    pub fn new(
        reviewer: Arc<dyn TokenReviewer>,
        ttl: Duration,
        metrics: AuthMetrics,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Arc<Self> {
        let memory = TokenCacheState {
            accepted: LruCache::new(REMEMBERED),
            rejected: LruCache::new(REMEMBERED),
            sources: ReviewRateLimiter::new(),
        };
        Arc::new(Self {
            reviewer,
            ttl,
            metrics,
            hash_key: rand::random(),
            memory: Mutex::new(memory),
            flights: ReviewFlights::new(REVIEWS, tasks, stop),
        })
    }

    /// Returns the cached verdict of a token, or reviews it; `address` is the client's, for the rate limit.
    pub async fn lookup(self: &Arc<Self>, token: &str, address: Option<IpAddr>) -> TokenLookup {
        let begun = Instant::now();
        let key = self.key(token);
        if let Some(known) = self.remembered(&key, begun) {
            self.metrics.record_lookup(Lookup::Hit, begun.elapsed());
            return known;
        }
        let known = match self.ask(key, token, address) {
            Some(answer) => {
                let _blocked = GaugeGuard::new(&self.metrics.blocked);
                wait(answer).await.unwrap_or_else(|| TokenLookup::Failed("token review was interrupted".to_owned()))
            }
            None => TokenLookup::Busy,
        };
        self.metrics.record_lookup(Lookup::Miss, begun.elapsed());
        known
    }

    /// Starts or joins the review of a token; `None` where a limit is reached.
    fn ask(self: &Arc<Self>, key: Key, token: &str, address: Option<IpAddr>) -> Option<Answer<TokenLookup>> {
        if let Some(answer) = self.flights.join(&key) {
            return Some(answer);
        }
        if !self.memory().sources.try_acquire(address, Instant::now().into_std()) {
            return None;
        }
        let (this, token) = (self.clone(), token.to_owned());
        self.flights.start(&key, async move { this.review(key, &token).await }).ok()
    }

    async fn review(&self, key: Key, token: &str) -> TokenLookup {
        let _in_flight = GaugeGuard::new(&self.metrics.in_flight);
        let late = |_| Err(ReviewError(format!("no response within {REVIEW_LIMIT:?}")));
        let verdict = timeout(REVIEW_LIMIT, self.reviewer.review(token)).await.unwrap_or_else(late);
        self.metrics.fetched(if verdict.is_ok() { Fetch::Ok } else { Fetch::Error });
        let (known, ttl) = match verdict {
            Ok(TokenVerdict::Accepted { name, uid, groups, extra }) => {
                let identity = UserInfo { name, uid, groups, extra, via: AuthenticatedBy::Token }.authenticated();
                (TokenLookup::Accepted(Arc::new(identity)), self.ttl)
            }
            Ok(TokenVerdict::Rejected) => {
                (TokenLookup::Rejected("invalid bearer token".to_owned()), self.ttl.max(INVALID_TTL))
            }
            Ok(TokenVerdict::Invalid(why)) => (TokenLookup::Rejected(why), INVALID_TTL),
            Err(ReviewError(why)) => (TokenLookup::Failed(why), Duration::ZERO),
        };
        self.remember(key, &known, ttl);
        known
    }

    fn remember(&self, key: Key, known: &TokenLookup, ttl: Duration) {
        if ttl.is_zero() {
            return;
        }
        let (until, mut memory) = (Instant::now() + ttl, self.memory());
        match known {
            TokenLookup::Accepted(identity) => drop(memory.accepted.put(key, (until, identity.clone()))),
            TokenLookup::Rejected(why) => drop(memory.rejected.put(key, (until, why.clone()))),
            TokenLookup::Failed(_) | TokenLookup::Busy => {}
        }
    }

    fn remembered(&self, key: &Key, now: Instant) -> Option<TokenLookup> {
        let mut memory = self.memory();
        if let Some((until, identity)) = memory.accepted.get(key) {
            if now < *until {
                return Some(TokenLookup::Accepted(identity.clone()));
            }
            memory.accepted.pop(key);
        }
        let (until, why) = memory.rejected.get(key)?;
        if now < *until {
            return Some(TokenLookup::Rejected(why.clone()));
        }
        memory.rejected.pop(key);
        None
    }

    /// Nested keyed SHA-256 with a random key of this process: cache keys in memory reveal nothing about tokens.
    fn key(&self, token: &str) -> Key {
        let inner = Sha256::new().chain_update(self.hash_key).chain_update(token).finalize();
        Sha256::new().chain_update(self.hash_key).chain_update(inner).finalize().into()
    }

    fn memory(&self) -> MutexGuard<'_, TokenCacheState> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Gauge that is incremented while this value lives.
struct GaugeGuard(prometheus::IntGauge);

impl GaugeGuard {
    fn new(gauge: &prometheus::IntGauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[cfg(test)]
mod tests;
