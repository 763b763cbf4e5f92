//! Bearer tokens: remembered verdicts before a review, and few reviews at a time (spec 04 §6.2, §10).
//!
//! A verdict is remembered for the TTL, a token the API server calls invalid for 10 s: it reports
//! those as errors, and without a memory every garbage token would be its work. What failed is not
//! remembered. Tokens are known by a keyed hash only.

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
    flights::{Answer, Flights, wait},
    identity::{Identity, Via},
    sources::Sources,
};
use crate::ports::{ReviewError, TokenReviewer, TokenVerdict};
use berth_metrics::{AuthMetrics, Fetch, Lookup};

/// Longest review, everything counted.
const REVIEW_LIMIT: Duration = Duration::from_secs(30);
/// How long an invalid token is known to be that.
const INVALID_TTL: Duration = Duration::from_secs(10);
/// Reviews at a time.
const REVIEWS: usize = 10;
/// Tokens remembered, of the good and of the bad: a flood of bad ones does not push out the good.
const REMEMBERED: NonZeroUsize = NonZeroUsize::new(4096).expect("not zero");

type Key = [u8; 32];

/// What is known of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Known {
    /// Whose it is.
    Accepted(Arc<Identity>),
    /// That it is nobody's, and why.
    Rejected(String),
    /// Nothing: the review failed.
    Failed(String),
    /// Nothing: there are too many reviews, of all or for this address.
    Busy,
}

/// Verdicts on tokens.
pub struct TokenCache {
    reviewer: Arc<dyn TokenReviewer>,
    ttl: Duration,
    metrics: AuthMetrics,
    hash_key: Key,
    memory: Mutex<Memory>,
    flights: Arc<Flights<Key, Known>>,
}

struct Memory {
    accepted: LruCache<Key, (Instant, Arc<Identity>)>,
    rejected: LruCache<Key, (Instant, String)>,
    sources: Sources,
}

impl TokenCache {
    /// `ttl` is how long a verdict is remembered; reviews are tasks of `tasks` and end with `stop`.
    pub fn new(
        reviewer: Arc<dyn TokenReviewer>,
        ttl: Duration,
        metrics: AuthMetrics,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Arc<Self> {
        let memory = Memory {
            accepted: LruCache::new(REMEMBERED),
            rejected: LruCache::new(REMEMBERED),
            sources: Sources::new(),
        };
        Arc::new(Self {
            reviewer,
            ttl,
            metrics,
            hash_key: rand::random(),
            memory: Mutex::new(memory),
            flights: Flights::new(REVIEWS, tasks, stop),
        })
    }

    /// What is known of a token that came from an address; asks where nothing is.
    pub async fn look_up(self: &Arc<Self>, token: &str, address: Option<IpAddr>) -> Known {
        let begun = Instant::now();
        let key = self.key(token);
        if let Some(known) = self.remembered(&key, begun) {
            self.metrics.looked_up(Lookup::Hit, begun.elapsed());
            return known;
        }
        let known = match self.ask(key, token, address) {
            Some(answer) => {
                let _blocked = Raised::new(&self.metrics.blocked);
                wait(answer).await.unwrap_or_else(|| Known::Failed("the review was cut off".to_owned()))
            }
            None => Known::Busy,
        };
        self.metrics.looked_up(Lookup::Miss, begun.elapsed());
        known
    }

    /// The review of that token; `None` where there can be no further one.
    fn ask(self: &Arc<Self>, key: Key, token: &str, address: Option<IpAddr>) -> Option<Answer<Known>> {
        if let Some(answer) = self.flights.join(&key) {
            return Some(answer);
        }
        if !self.memory().sources.may(address, Instant::now().into_std()) {
            return None;
        }
        let (this, token) = (self.clone(), token.to_owned());
        self.flights.start(&key, async move { this.review(key, &token).await }).ok()
    }

    async fn review(&self, key: Key, token: &str) -> Known {
        let _in_flight = Raised::new(&self.metrics.in_flight);
        let late = |_| Err(ReviewError(format!("no answer within {REVIEW_LIMIT:?}")));
        let verdict = timeout(REVIEW_LIMIT, self.reviewer.review(token)).await.unwrap_or_else(late);
        self.metrics.fetched(if verdict.is_ok() { Fetch::Ok } else { Fetch::Error });
        let (known, ttl) = match verdict {
            Ok(TokenVerdict::Accepted { name, uid, groups, extra }) => {
                let identity = Identity { name, uid, groups, extra, via: Via::Token }.authenticated();
                (Known::Accepted(Arc::new(identity)), self.ttl)
            }
            Ok(TokenVerdict::Rejected) => {
                (Known::Rejected("invalid bearer token".to_owned()), self.ttl.max(INVALID_TTL))
            }
            Ok(TokenVerdict::Invalid(why)) => (Known::Rejected(why), INVALID_TTL),
            Err(ReviewError(why)) => (Known::Failed(why), Duration::ZERO),
        };
        self.remember(key, &known, ttl);
        known
    }

    fn remember(&self, key: Key, known: &Known, ttl: Duration) {
        if ttl.is_zero() {
            return;
        }
        let (until, mut memory) = (Instant::now() + ttl, self.memory());
        match known {
            Known::Accepted(identity) => drop(memory.accepted.put(key, (until, identity.clone()))),
            Known::Rejected(why) => drop(memory.rejected.put(key, (until, why.clone()))),
            Known::Failed(_) | Known::Busy => {}
        }
    }

    fn remembered(&self, key: &Key, now: Instant) -> Option<Known> {
        let mut memory = self.memory();
        if let Some((until, identity)) = memory.accepted.get(key) {
            if now < *until {
                return Some(Known::Accepted(identity.clone()));
            }
            memory.accepted.pop(key);
        }
        let (until, why) = memory.rejected.get(key)?;
        if now < *until {
            return Some(Known::Rejected(why.clone()));
        }
        memory.rejected.pop(key);
        None
    }

    /// A keyed hash, made with a key of this process: it tells nothing to whoever sees memory.
    fn key(&self, token: &str) -> Key {
        let inner = Sha256::new().chain_update(self.hash_key).chain_update(token).finalize();
        Sha256::new().chain_update(self.hash_key).chain_update(inner).finalize().into()
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A gauge that is up by one while this lives.
struct Raised(prometheus::IntGauge);

impl Raised {
    fn new(gauge: &prometheus::IntGauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Raised {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[cfg(test)]
mod tests;
