//! Subnets for the pod networks of tests, each used by one runtime of this machine at a time.
//!
//! Test processes run side by side. A lock file for each subnet says that it is taken; the kernel drops the lock with the
//! process, so that nothing stays reserved after a kill.

use std::{
    fs::{self, File},
    path::PathBuf,
    sync::atomic::{AtomicU16, Ordering},
};

use rustix::fs::{FlockOperation, flock};

/// Subnets that one second octet has room for.
const PER_OCTET: u16 = 250;
/// Second octets from the base on that are the caller's.
const OCTETS: u16 = 50;

/// A /24 of 10.0.0.0/8 that nobody else uses until this is dropped.
#[derive(Debug)]
pub struct Subnet {
    cidr: String,
    _lock: File,
}

impl Subnet {
    /// Takes a free subnet whose second octet is `base` to `base + 49`.
    ///
    /// # Panics
    /// If none is free or the lock files cannot be made.
    pub fn take(base: u16) -> Self {
        static NEXT: AtomicU16 = AtomicU16::new(0);
        let directory = directory();
        fs::create_dir_all(&directory).expect("a directory for locks");
        let count = PER_OCTET * OCTETS;
        let first = u16::try_from(std::process::id() % u32::from(count)).expect("small");
        for _ in 0..count {
            let number = (first + NEXT.fetch_add(1, Ordering::Relaxed) % count) % count;
            let lock = File::create(directory.join(format!("{base}-{number}"))).expect("a lock file");
            if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
                let cidr = format!("10.{}.{}.0/24", base + number / PER_OCTET, number % PER_OCTET);
                return Self { cidr, _lock: lock };
            }
        }
        panic!("all {count} subnets from 10.{base}.0.0 on are taken");
    }

    /// The subnet, as `10.100.0.0/24`.
    pub fn cidr(&self) -> &str {
        &self.cidr
    }
}

fn directory() -> PathBuf {
    std::env::temp_dir().join("berth-test-subnets")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subnet_is_taken_once_and_is_free_again_afterwards() {
        let taken: Vec<Subnet> = (0..20).map(|_| Subnet::take(100)).collect();
        let distinct: std::collections::BTreeSet<&str> = taken.iter().map(Subnet::cidr).collect();
        assert_eq!(distinct.len(), taken.len());
        let mut locks = Vec::new();
        for subnet in &taken {
            let [_, second, third, _] = subnet.cidr().split('.').collect::<Vec<_>>()[..] else { panic!("four octets") };
            let second: u16 = second.parse().expect("a number");
            let number = (second - 100) * PER_OCTET + third.parse::<u16>().expect("a number");
            let lock = File::create(directory().join(format!("100-{number}"))).expect("a lock file");
            assert!(flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err(), "{} is free", subnet.cidr());
            locks.push(lock);
        }
        drop(taken);
        // None of its numbers is the only one that others may have taken meanwhile.
        let is_free = |lock: &File| flock(lock, FlockOperation::NonBlockingLockExclusive).is_ok();
        assert!(locks.iter().any(is_free), "no subnet is free again");
    }
}
