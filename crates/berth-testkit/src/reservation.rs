//! Machine-wide reservation of port and subnet numbers between test processes, by lock files.
//!
//! A lock file for each number marks it as taken. The kernel releases the lock with the process, so that nothing
//! stays reserved after a kill.

use std::{
    fs::{self, File},
    net::TcpListener,
    path::PathBuf,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU16, Ordering},
    },
};

use rustix::fs::{FlockOperation, flock};

/// Port range for servers that tests start. Ephemeral ports begin at 32768 and node ports at 30000: the kernel never
/// assigns one of these by chance.
const PORTS: std::ops::Range<u16> = 12_000..20_000;

/// Reserves one of the `count` numbers from `first` on that is free and `usable`, until the file is dropped; `None`
/// if there is none.
///
/// # Panics
/// The lock files cannot be created.
pub(crate) fn take(kind: &str, first: u16, count: u16, usable: impl Fn(u16) -> bool) -> Option<(u16, File)> {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let directory = directory();
    fs::create_dir_all(&directory).expect("failed to create the lock directory");
    // Each process starts at another number, to reduce collisions with locks of others.
    let start = u16::try_from(std::process::id().wrapping_mul(31) % u32::from(count)).expect("small");
    (0..count).find_map(|_| {
        let turn = NEXT.fetch_add(1, Ordering::Relaxed);
        let offset = (u32::from(start) + u32::from(turn)) % u32::from(count);
        let number = first + u16::try_from(offset).expect("less than the count");
        let lock = File::create(directory.join(format!("{kind}-{number}"))).expect("failed to create the lock file");
        flock(&lock, FlockOperation::NonBlockingLockExclusive).ok()?;
        usable(number).then_some((number, lock))
    })
}

/// Reserves ports without a listener until this process exits.
///
/// # Panics
/// No port is left.
pub fn free_ports<const N: usize>() -> [u16; N] {
    static TAKEN: Mutex<Vec<File>> = Mutex::new(Vec::new());
    std::array::from_fn(|_| {
        let is_free = |port| TcpListener::bind(("0.0.0.0", port)).is_ok();
        let (port, lock) = take("port", PORTS.start, PORTS.end - PORTS.start, is_free).expect("no free port");
        TAKEN.lock().unwrap_or_else(PoisonError::into_inner).push(lock);
        port
    })
}

fn directory() -> PathBuf {
    std::env::temp_dir().join("berth-test-reservations")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_number_is_taken_once_and_is_free_again_afterwards() {
        let take = || take("number-of-the-test", 0, 3, |number| number != 1);
        let (first, second) = (take().expect("one is free"), take().expect("one is free"));
        assert_eq!(BTreeSet::from([first.0, second.0]), BTreeSet::from([0, 2]));
        assert!(take().is_none(), "all are taken");
        drop(first.1);
        assert!(take().is_some(), "one is free again");
    }

    #[test]
    fn ports_differ_and_are_none_the_kernel_chooses() {
        let ports: BTreeSet<u16> = (0..20).flat_map(|_| free_ports::<2>()).collect();
        assert_eq!(ports.len(), 40);
        let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").expect("a range");
        let lowest: u16 = range.split_whitespace().next().expect("a number").parse().expect("a number");
        assert!(ports.iter().all(|port| PORTS.contains(port) && *port < lowest), "{ports:?}, the kernel's: {range}");
    }

    #[test]
    fn a_port_with_a_listener_is_not_free() {
        let ports: Vec<u16> = free_ports::<8>().to_vec();
        let listener = TcpListener::bind(("127.0.0.1", ports[0])).expect("no free port");
        assert!(TcpListener::bind(("0.0.0.0", ports[0])).is_err(), "listening on one address is seen from all");
        drop(listener);
    }
}
