//! How often an address may make us ask the API server about tokens. Pure. Spec 04 §10.
//!
//! Only tokens nobody has asked about count, so whoever has a good one never notices; somebody who
//! invents them gets a few through, and does not get the API server to work for him.

use std::{
    net::{IpAddr, Ipv6Addr},
    num::NonZeroUsize,
    time::{Duration, Instant},
};

use lru::LruCache;

/// One review each.
const INTERVAL: Duration = Duration::from_millis(100);
/// Reviews at once after a pause.
const BURST: u32 = 20;
/// Addresses remembered; who is forgotten begins anew.
const ADDRESSES: NonZeroUsize = NonZeroUsize::new(4096).expect("not zero");

/// A bucket per address; those that share a network prefix of IPv6 share a bucket.
pub struct Sources(LruCache<Option<IpAddr>, Instant>);

impl Sources {
    /// All full.
    pub fn new() -> Self {
        Self(LruCache::new(ADDRESSES))
    }

    /// Whether one more review may be made for that address (`None`: for those without one).
    pub fn may(&mut self, address: Option<IpAddr>, now: Instant) -> bool {
        // The bucket is full again at this time.
        let full = self.0.get_or_insert_mut(address.map(network), || now);
        let base = (*full).max(now);
        if base.saturating_duration_since(now) > INTERVAL * (BURST - 1) {
            return false;
        }
        *full = base + INTERVAL;
        true
    }
}

/// What stands for an address where shares are counted: of IPv6 the network, since a machine has
/// all of it.
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
        let (mut sources, start) = (Sources::new(), Instant::now());
        let ip = |text: &str| Some(text.parse::<IpAddr>().expect("an address"));
        let burst = |sources: &mut Sources, who, now| (0..100).filter(|_| sources.may(who, now)).count();
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
