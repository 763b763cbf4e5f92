//! Token-bucket rate limiter for the local gRPC sockets.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::time::Instant;
use tonic::{Request, Status};

use berth_sys::token_bucket::TokenBucket;

/// Refill rate: requests per second (spec 04b §12).
const PER_SECOND: u32 = 100;
/// Burst: capacity of the bucket.
const BURST: u32 = 10;

/// Rate limit, shared by its clones.
#[derive(Clone, Debug)]
pub struct RateLimit(Arc<Mutex<TokenBucket>>);

impl Default for RateLimit {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(TokenBucket::per_second(PER_SECOND, BURST, Instant::now().into_std()))))
    }
}

impl RateLimit {
    /// Takes a token.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`, where the bucket is empty.
    pub fn admit<T>(&self, request: Request<T>) -> Result<Request<T>, Status> {
        let mut bucket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_admitted = bucket.try_take(Instant::now().into_std());
        if is_admitted { Ok(request) } else { Err(Status::resource_exhausted("rejected by rate limit")) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
