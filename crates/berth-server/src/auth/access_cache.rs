//! What somebody may do: remembered verdicts before a review (spec 04 §6.4, §10).
//!
//! A "yes" that grows old is asked about again while it still holds, so that nobody waits for the
//! API server who asks often.

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

use super::flights::{Flights, wait};
use crate::ports::{AccessRequest, AccessReviewer, ReviewError};

/// Longest review, everything counted.
const REVIEW_LIMIT: Duration = Duration::from_secs(30);
/// Verdicts remembered.
const REMEMBERED: NonZeroUsize = NonZeroUsize::new(8192).expect("not zero");
/// Requests whose words are longer are not remembered; in bytes.
const LONGEST: usize = 10_000;
/// Reviews at a time; who is over it is told that authorization failed.
const REVIEWS: usize = 256;

/// How long verdicts are remembered.
#[derive(Clone, Copy, Debug)]
pub struct AccessTtls {
    /// A "yes".
    pub authorized: Duration,
    /// A "no".
    pub unauthorized: Duration,
    /// How much longer a "yes" about [`HELD`] holds while nobody answers; zero is not at all.
    pub stale: Duration,
}

/// Subresources that are worth more to the one who watches the node than a verdict that is fresh.
pub const HELD: [&str; 2] = ["healthz", "metrics"];

/// Whether it is allowed, or why nobody knows.
pub type Decision = Result<bool, String>;

/// Verdicts on accesses.
pub struct AccessCache {
    reviewer: Arc<dyn AccessReviewer>,
    ttls: AccessTtls,
    memory: Mutex<LruCache<String, Entry>>,
    flights: Arc<Flights<String, Decision>>,
}

#[derive(Clone, Copy)]
struct Entry {
    allowed: bool,
    /// From then on a "yes" is asked about again.
    stale: Instant,
    until: Instant,
}

impl AccessCache {
    /// Reviews are tasks of `tasks` and end with `stop`.
    pub fn new(
        reviewer: Arc<dyn AccessReviewer>,
        ttls: AccessTtls,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Arc<Self> {
        let memory = Mutex::new(LruCache::new(REMEMBERED));
        Arc::new(Self { reviewer, ttls, memory, flights: Flights::new(REVIEWS, tasks, stop) })
    }

    /// Whether somebody may do that; asks where it is not known.
    ///
    /// # Errors
    /// Why it cannot be known.
    pub async fn decide(self: &Arc<Self>, request: AccessRequest) -> Decision {
        let key = key(&request);
        let now = Instant::now();
        let known = self.memory().get(&key).copied().filter(|entry| now < entry.until);
        if let Some(entry) = known {
            if entry.allowed && now >= entry.stale {
                // Nobody waits for it; that there is no room now means a later one asks again.
                let _ = self.flights.start(&key, self.clone().review(key.clone(), request));
            }
            return Ok(entry.allowed);
        }
        let is_held = HELD.contains(&request.subresource.as_str());
        let decision = match self.flights.start(&key, self.clone().review(key.clone(), request)) {
            Ok(answer) => wait(answer).await.unwrap_or_else(|| Err("the review was cut off".to_owned())),
            Err(_) => Err(format!("more than {REVIEWS} reviews are under way")),
        };
        match decision {
            Err(why) if is_held && self.may_still(&key) => {
                debug!(err = why, "Nobody answers whether this is allowed; it was, and is for a moment longer");
                Ok(true)
            }
            decision => decision,
        }
    }

    /// Whether a "yes" that has just grown too old is all there is.
    fn may_still(&self, key: &String) -> bool {
        let now = Instant::now();
        self.memory().get(key).is_some_and(|entry| entry.allowed && now < entry.until + self.ttls.stale)
    }

    async fn review(self: Arc<Self>, key: String, request: AccessRequest) -> Decision {
        let late = |_| Err(ReviewError(format!("no answer within {REVIEW_LIMIT:?}")));
        let verdict = timeout(REVIEW_LIMIT, self.reviewer.review(&request)).await.unwrap_or_else(late);
        let verdict = verdict.map_err(|ReviewError(why)| why)?;
        if verdict.allowed && verdict.denied {
            self.memory().pop(&key); // somebody does answer
            return Err("webhook subject access review returned both allow and deny response".to_owned());
        }
        self.remember(key, verdict.allowed);
        Ok(verdict.allowed)
    }

    fn remember(&self, key: String, allowed: bool) {
        let ttl = if allowed { self.ttls.authorized } else { self.ttls.unauthorized };
        if !ttl.is_zero() && key.len() < LONGEST {
            let now = Instant::now();
            self.memory().put(key, Entry { allowed, stale: now + ttl * 4 / 5, until: now + ttl });
        }
    }

    fn memory(&self) -> MutexGuard<'_, LruCache<String, Entry>> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The request, word by word; JSON, so that no word can pass for two.
fn key(request: &AccessRequest) -> String {
    let AccessRequest { identity, verb, subresource, node } = request;
    json!([verb, subresource, node, identity.name, identity.uid, identity.groups, identity.extra]).to_string()
}

#[cfg(test)]
mod tests;
