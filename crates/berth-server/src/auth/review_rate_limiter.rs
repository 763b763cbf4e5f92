//! Per-address rate limiter for token reviews. Pure. Spec 04 §10.
//!
//! Only tokens missing in the cache count, so that callers with valid tokens are not affected; a client that invents
//! tokens causes a few reviews and cannot load the API server further.

use std::{
    net::{IpAddr, Ipv6Addr},
    num::NonZeroUsize,
    time::{Duration, Instant},
};

use lru::LruCache;

use berth_sys::token_bucket::TokenBucket;

/// Refill interval per review.
const INTERVAL: Duration = Duration::from_millis(100);
/// Burst after a pause.
const BURST: u32 = 20;
/// Capacity in addresses; an evicted address starts with a full bucket.
const ADDRESSES: NonZeroUsize = NonZeroUsize::new(4096).expect("not zero");

/// Token bucket per address; IPv6 addresses of one network share a bucket.
pub struct ReviewRateLimiter(LruCache<Option<IpAddr>, TokenBucket>);

impl ReviewRateLimiter {
    /// Creates a limiter with full buckets.
    pub fn new() -> Self {
        Self(LruCache::new(ADDRESSES))
    }

    /// Takes a token for one review of that address (`None` for requests without an address); returns whether there was
    /// one.
    pub fn try_acquire(&mut self, address: Option<IpAddr>, now: Instant) -> bool {
        let full = || TokenBucket::new(INTERVAL, BURST, now);
        self.0.get_or_insert_mut(address.map(network), full).try_take(now)
    }
}

/// Key for per-address limits: of IPv6 the /64 network, since one machine has all of it.
pub fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(six) => {
            let [a, b, c, d, ..] = six.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
        four @ IpAddr::V4(_) => four,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_burst_it_goes_slowly() {
        let (mut sources, start) = (ReviewRateLimiter::new(), Instant::now());
        let ip = |text: &str| Some(text.parse::<IpAddr>().expect("an address"));
        let burst =
            |sources: &mut ReviewRateLimiter, who, now| (0..100).filter(|_| sources.try_acquire(who, now)).count();
        assert_eq!(burst(&mut sources, ip("192.0.2.1"), start), 20);
        assert_eq!(burst(&mut sources, ip("::ffff:192.0.2.1"), start), 0, "the same address");
        assert_eq!(burst(&mut sources, ip("192.0.2.2"), start), 20, "another one");
        assert_eq!(burst(&mut sources, ip("2001:db8::1"), start), 20);
        assert_eq!(burst(&mut sources, ip("2001:db8::2"), start), 0, "the same network");
        assert_eq!(burst(&mut sources, None, start), 20);
        assert_eq!(burst(&mut sources, ip("192.0.2.1"), start + Duration::from_millis(350)), 3);
        assert_eq!(burst(&mut sources, ip("192.0.2.1"), start + Duration::from_secs(60)), 20);
    }
}
