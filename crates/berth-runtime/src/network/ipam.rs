//! IP address management (IPAM) for pods. Pure.
//!
//! Allocates next-fit from a cursor, so that an address is not reused soon. A released address also rests for [`REST`],
//! while neighbor caches and connections expire, unless no other address is free. Implements spec 09b §11.1-§11.3, §14.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    time::{Duration, Instant},
};

use super::cidr::Cidr;

/// Minimum time before a released address is reused.
pub const REST: Duration = Duration::from_secs(10);

/// All addresses of a range are leased.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("no IP addresses available in range set: {first}-{last}")]
pub struct RangeExhausted {
    /// First address of the range.
    pub first: IpAddr,
    /// Last address of the range.
    pub last: IpAddr,
}

/// Address leases of pods.
#[derive(Debug, Default)]
pub struct Ipam {
    ranges: Vec<Range>,
    leases: BTreeMap<IpAddr, String>,
    resting: BTreeMap<IpAddr, Instant>,
}

#[derive(Debug)]
struct Range {
    net: Cidr,
    /// Offset of the address that was leased last.
    cursor: u128,
}

impl Range {
    /// Offsets of the first and the last usable address.
    fn bounds(&self) -> (u128, u128) {
        let last = self.net.size_less_one();
        // The last address of an IPv4 network is the broadcast address; IPv6 has none.
        (1, if self.net.is_v6() { last } else { last.saturating_sub(1) })
    }

    fn exhausted(&self) -> RangeExhausted {
        let (first, last) = self.bounds();
        RangeExhausted { first: self.net.nth(first), last: self.net.nth(last) }
    }
}

impl Ipam {
    /// Sets the networks for new leases; existing leases stay.
    pub fn set_nets(&mut self, nets: &[Cidr]) {
        let cursor = |net: Cidr| self.ranges.iter().find(|r| r.net == net).map_or(1, |r| r.cursor);
        self.ranges = nets.iter().map(|net| Range { net: *net, cursor: cursor(*net) }).collect();
    }

    /// The networks that new leases come from.
    pub fn nets(&self) -> Vec<Cidr> {
        self.ranges.iter().map(|r| r.net).collect()
    }

    /// Leases one address per network to a pod; returns the existing leases if the pod has any.
    ///
    /// # Errors
    /// A network has no free address; then nothing is leased.
    pub fn lease(&mut self, pod: &str, now: Instant) -> Result<Vec<IpAddr>, RangeExhausted> {
        let had = self.of(pod);
        if !had.is_empty() {
            return Ok(had);
        }
        self.resting.retain(|_, since| now.saturating_duration_since(*since) < REST);
        let found: Vec<u128> = self.ranges.iter().map(|range| self.free(range)).collect::<Result<_, _>>()?;
        let mut given = Vec::new();
        for (range, place) in self.ranges.iter_mut().zip(found) {
            range.cursor = place;
            let address = range.net.nth(place);
            self.resting.remove(&address);
            self.leases.insert(address, pod.to_owned());
            given.push(address);
        }
        Ok(given)
    }

    fn free(&self, range: &Range) -> Result<u128, RangeExhausted> {
        let (first, last) = range.bounds();
        let is_free = |place: u128| {
            let address = range.net.nth(place);
            place != 1 && !self.leases.contains_key(&address) && !self.resting.contains_key(&address)
        };
        // This many attempts suffice to find a free address, if any: walking an IPv6 network would never end.
        let tries = self.leases.len() as u128 + self.resting.len() as u128 + 2;
        let mut place = range.cursor;
        for _ in 0..tries.min(last) {
            place = if place >= last || place < first { first } else { place + 1 };
            if place <= last && is_free(place) {
                return Ok(place);
            }
        }
        // Only resting addresses remain: takes the one that has rested longest.
        let resting = self.resting.iter().filter_map(|(address, since)| Some((*since, range.net.place(*address)?)));
        resting.min().map(|(_, place)| place).ok_or_else(|| range.exhausted())
    }

    /// Releases the addresses of a pod. Returns whether it had any.
    pub fn release(&mut self, pod: &str, now: Instant) -> bool {
        let had = self.of(pod);
        for address in &had {
            self.leases.remove(address);
            self.resting.insert(*address, now);
        }
        !had.is_empty()
    }

    /// The addresses of a pod, in the order of the networks.
    pub fn of(&self, pod: &str) -> Vec<IpAddr> {
        let mut had: Vec<IpAddr> = self.leases.iter().filter(|(_, p)| *p == pod).map(|(a, _)| *a).collect();
        had.sort_by_key(|address| self.ranges.iter().position(|r| r.net.contains(*address)).unwrap_or(usize::MAX));
        had
    }

    /// All leases by address.
    pub fn leases(&self) -> &BTreeMap<IpAddr, String> {
        &self.leases
    }

    /// Replaces all leases with those of these pods.
    pub fn restore<'a>(&mut self, pods: impl IntoIterator<Item = (&'a str, &'a [IpAddr])>) {
        self.resting.clear();
        self.leases = pods.into_iter().flat_map(|(pod, has)| has.iter().map(move |a| (*a, pod.to_owned()))).collect();
        for range in &mut self.ranges {
            range.cursor = self.leases.keys().filter_map(|a| range.net.place(*a)).max().unwrap_or(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(nets: &[&str]) -> Ipam {
        let mut ipam = Ipam::default();
        ipam.set_nets(&nets.iter().map(|n| n.parse().expect("a net")).collect::<Vec<_>>());
        ipam
    }

    fn format_ips(given: &[IpAddr]) -> String {
        given.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
    }

    #[test]
    fn five_pods_fit_into_a_small_net() {
        // AC-09b-N3
        let (mut ipam, start) = (of(&["10.9.0.0/29"]), Instant::now());
        for n in 2..=6 {
            assert_eq!(format_ips(&ipam.lease(&n.to_string(), start).expect("free")), format!("10.9.0.{n}"));
        }
        let full = ipam.lease("7", start).expect_err("none left").to_string();
        assert_eq!(full, "no IP addresses available in range set: 10.9.0.1-10.9.0.6");
        assert!(ipam.release("4", start) && !ipam.release("4", start));
        // critest 7: a resting address is used when no other is free
        assert!(ipam.release("3", start + Duration::from_secs(1)));
        let soon = start + Duration::from_secs(2);
        assert_eq!(format_ips(&ipam.lease("7", soon).expect("rested longest")), "10.9.0.4");
        assert_eq!(format_ips(&ipam.lease("8", soon).expect("the other")), "10.9.0.3");
        assert!(ipam.lease("9", soon).is_err());
    }

    #[test]
    fn an_address_rests_while_another_is_free() {
        let (mut ipam, start) = (of(&["10.9.0.0/29"]), Instant::now());
        for n in 2..=5 {
            ipam.lease(&n.to_string(), start).expect("free");
        }
        ipam.release("2", start);
        let soon = start + REST - Duration::from_millis(1);
        assert_eq!(format_ips(&ipam.lease("7", soon).expect("free")), "10.9.0.6");
    }

    #[test]
    fn both_versions_and_what_a_pod_has() {
        let (mut ipam, now) = (of(&["fd00::/64", "10.9.0.0/24"]), Instant::now());
        assert_eq!(format_ips(&ipam.lease("a", now).expect("free")), "fd00::2,10.9.0.2");
        assert_eq!(format_ips(&ipam.lease("a", now).expect("the same")), "fd00::2,10.9.0.2");
        assert_eq!(format_ips(&ipam.lease("b", now).expect("free")), "fd00::3,10.9.0.3");
        ipam.release("a", now);
        ipam.release("b", now);
        assert_eq!(format_ips(&ipam.lease("c", now).expect("next fit")), "fd00::4,10.9.0.4");
    }

    #[test]
    fn a_full_second_net_leases_nothing_of_the_first() {
        let (mut ipam, now) = (of(&["10.9.0.0/24", "fd00::/127"]), Instant::now());
        assert!(ipam.lease("a", now).is_err());
        assert!(ipam.leases().is_empty());
        for tiny in ["10.0.0.0/31", "10.0.0.0/32", "10.0.0.0/30"] {
            assert_eq!(of(&[tiny]).lease("a", now).is_ok(), tiny.ends_with("30"), "{tiny}");
        }
    }

    #[test]
    fn another_net_is_for_new_pods_only() {
        let (mut ipam, now) = (of(&["10.9.0.0/24"]), Instant::now());
        ipam.lease("old", now).expect("free");
        ipam.set_nets(&["10.10.0.0/24".parse().expect("a net")]);
        assert_eq!(format_ips(&ipam.lease("new", now).expect("free")), "10.10.0.2");
        assert_eq!(format_ips(&ipam.of("old")), "10.9.0.2");
    }

    #[test]
    fn restoring_releases_leases_of_unknown_pods() {
        // AC-09b-N4, AC-09b-N5
        let (mut ipam, now) = (of(&["10.9.0.0/24"]), Instant::now());
        for pod in ["a", "b", "c"] {
            ipam.lease(pod, now).expect("free");
        }
        let kept = ipam.of("b");
        ipam.restore([("b", kept.as_slice())]);
        assert_eq!(ipam.leases().len(), 1);
        assert_eq!(format_ips(&ipam.lease("d", now).expect("free")), "10.9.0.4");
        ipam.restore([]);
        assert!(ipam.leases().is_empty());
    }

    proptest! {
        #[test]
        fn leased_addresses_are_unique(acts in proptest::collection::vec((0u8..20, any::<bool>()), 0..200)) {
            let (mut ipam, mut now) = (of(&["10.9.0.0/27"]), Instant::now());
            for (pod, leases) in acts {
                now += Duration::from_secs(3);
                if leases {
                    if let Ok(given) = ipam.lease(&pod.to_string(), now) {
                        prop_assert_eq!(given.len(), 1);
                    }
                } else {
                    ipam.release(&pod.to_string(), now);
                }
                let mut pods: Vec<&String> = ipam.leases().values().collect();
                pods.sort();
                let count = pods.len();
                pods.dedup();
                prop_assert_eq!(count, pods.len());
                for address in ipam.leases().keys() {
                    let last = address.to_string().rsplit('.').next().expect("a part").parse::<u8>().expect("a number");
                    prop_assert!((2..=30).contains(&last));
                }
            }
        }
    }
}
