//! Pod subnets for test runtimes, reserved machine-wide.
//!
//! Test processes run in parallel; [`reservation`] prevents conflicts.

use std::fs::File;

use super::reservation;

/// Number of subnets per second octet.
const PER_OCTET: u16 = 250;
/// Number of second octets, from the base on, that a caller may use.
const OCTETS: u16 = 50;

/// A /24 subnet of 10.0.0.0/8, reserved until this is dropped.
#[derive(Debug)]
pub struct Subnet {
    cidr: String,
    _lock: File,
}

impl Subnet {
    /// Reserves a free subnet whose second octet is `base` to `base + 49`.
    ///
    /// # Panics
    /// No subnet is free, or the lock files cannot be created.
    pub fn take(base: u16) -> Self {
        let count = PER_OCTET * OCTETS;
        let Some((number, lock)) = reservation::take("subnet", base * PER_OCTET, count, |_| true) else {
            panic!("all {count} subnets from 10.{base}.0.0 are in use");
        };
        Self { cidr: format!("10.{}.{}.0/24", number / PER_OCTET, number % PER_OCTET), _lock: lock }
    }

    /// Subnet in CIDR notation, such as `10.100.0.0/24`.
    pub fn cidr(&self) -> &str {
        &self.cidr
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subnets_taken_side_by_side_differ_and_lie_in_their_octets() {
        let taken: Vec<Subnet> = (0..20).map(|_| Subnet::take(100)).collect();
        let distinct: std::collections::BTreeSet<&str> = taken.iter().map(Subnet::cidr).collect();
        assert_eq!(distinct.len(), taken.len());
        for cidr in distinct {
            let [_, second, third, _] = cidr.split('.').collect::<Vec<_>>()[..] else { panic!("four octets") };
            assert!((100..150).contains(&second.parse::<u16>().expect("a number")), "{cidr}");
            assert!(third.parse::<u16>().expect("a number") < PER_OCTET, "{cidr}");
        }
    }
}
