//! Token-bucket rate limiter for the local gRPC sockets.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;
use tonic::{Request, Status};

/// Refill rate: requests per second (spec 04b §12).
const PER_SECOND: f64 = 100.0;
/// Burst: capacity of the bucket.
const BURST: f64 = 10.0;

/// Token bucket, shared by its clones.
#[derive(Clone, Debug)]
pub struct RateLimit(Arc<Mutex<Bucket>>);

#[derive(Clone, Copy, PartialEq, Debug)]
struct Bucket {
    tokens: f64,
    filled: Instant,
}

impl Default for RateLimit {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Bucket { tokens: BURST, filled: Instant::now() })))
    }
}

impl RateLimit {
    /// Takes a token.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`, where the bucket is empty.
    pub fn admit<T>(&self, request: Request<T>) -> Result<Request<T>, Status> {
        let mut bucket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let filled = refill(bucket.tokens, now.saturating_duration_since(bucket.filled));
        let is_admitted = filled >= 1.0;
        *bucket = Bucket { tokens: if is_admitted { filled - 1.0 } else { filled }, filled: now };
        if is_admitted { Ok(request) } else { Err(Status::resource_exhausted("rejected by rate limit")) }
    }
}

fn refill(tokens: f64, passed: Duration) -> f64 {
    (tokens + passed.as_secs_f64() * PER_SECOND).min(BURST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn ten_at_once_then_one_every_ten_milliseconds() {
        let limit = RateLimit::default();
        let admitted = |n: usize| (0..n).filter(|_| limit.clone().admit(Request::new(())).is_ok()).count();
        assert_eq!(admitted(50), 10);
        tokio::time::advance(Duration::from_millis(30)).await;
        assert_eq!(admitted(50), 3);
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!(admitted(50), 10, "no more than the burst is saved up");
        let refused = limit.admit(Request::new(())).expect_err("empty");
        assert_eq!((refused.code(), refused.message()), (tonic::Code::ResourceExhausted, "rejected by rate limit"));
    }
}
