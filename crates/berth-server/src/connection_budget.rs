//! Connection budget of a listener: limits in total, per address, and for unauthenticated connections.
//!
//! Unauthenticated connections have a smaller budget and are evicted by newer ones: a few addresses that open idle
//! connections must not lock out the API server. Pure but for the token that ends a connection.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};

use super::auth::network;

/// Maximum of authenticated connections: in total, and per address (of IPv6: per /64 network, which is what one machine
/// has to itself).
const AUTHENTICATED: (usize, usize) = (4096, 2048);
/// Maximum of unauthenticated connections: in total, and per address.
const UNAUTHENTICATED: (usize, usize) = (1024, 64);

/// Counts the connections of a listener.
#[derive(Clone, Debug, Default)]
pub struct ConnectionBudget(Arc<Mutex<ConnectionTable>>);

#[derive(Debug, Default)]
struct ConnectionTable {
    /// Number of authenticated connections by address.
    authenticated: HashMap<IpAddr, usize>,
    /// Unauthenticated connections, oldest first.
    unauthenticated: BTreeMap<u64, (IpAddr, CancellationToken)>,
    last: u64,
}

/// Slot of one connection in the budget; released when dropped.
#[derive(Debug)]
pub struct ConnectionSlot {
    budget: ConnectionBudget,
    address: IpAddr,
    number: u64,
    is_authenticated: Mutex<bool>,
    evicted: CancellationToken,
}

impl ConnectionBudget {
    fn table(&self) -> MutexGuard<'_, ConnectionTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a slot for an accepted connection. Where the budget is exhausted, evicts the oldest unauthenticated
    /// connection of the address, or of all.
    pub fn accept(&self, address: IpAddr) -> ConnectionSlot {
        let (address, evicted) = (network(address), CancellationToken::new());
        let mut table = self.table();
        let own = || table.unauthenticated.iter().filter(|(_, (other, _))| *other == address);
        let oldest = if own().count() >= UNAUTHENTICATED.1 {
            own().next().map(|(number, _)| *number)
        } else if table.unauthenticated.len() >= UNAUTHENTICATED.0 {
            table.unauthenticated.keys().next().copied()
        } else {
            None
        };
        if let Some((_, token)) = oldest.and_then(|number| table.unauthenticated.remove(&number)) {
            token.cancel();
        }
        table.last += 1;
        let number = table.last;
        table.unauthenticated.insert(number, (address, evicted.clone()));
        ConnectionSlot { budget: self.clone(), address, number, is_authenticated: Mutex::new(false), evicted }
    }
}

impl ConnectionSlot {
    /// Waits until the connection is evicted.
    pub fn evicted(&self) -> WaitForCancellationFuture<'_> {
        self.evicted.cancelled()
    }

    /// Marks the connection as authenticated; evicts it where the limit in total or of its address is reached.
    pub fn authenticated(&self) {
        let mut is_authenticated = self.is_authenticated.lock().unwrap_or_else(PoisonError::into_inner);
        if *is_authenticated {
            return;
        }
        let mut table = self.budget.table();
        if table.unauthenticated.remove(&self.number).is_none() {
            return; // already evicted
        }
        let all: usize = table.authenticated.values().sum();
        let own = table.authenticated.entry(self.address).or_default();
        if all >= AUTHENTICATED.0 || *own >= AUTHENTICATED.1 {
            return self.evicted.cancel();
        }
        *own += 1;
        *is_authenticated = true;
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let is_authenticated = *self.is_authenticated.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut table = self.budget.table();
        table.unauthenticated.remove(&self.number);
        if is_authenticated && let Some(own) = table.authenticated.get_mut(&self.address) {
            *own -= 1;
        }
        table.authenticated.retain(|_, own| *own > 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> IpAddr {
        IpAddr::from([127, 0, 0, last])
    }

    fn is_evicted(place: &ConnectionSlot) -> bool {
        place.evicted.is_cancelled()
    }

    #[test]
    fn the_oldest_unauthenticated_connection_gives_way() {
        let budget = ConnectionBudget::default();
        let one: Vec<_> = (0..UNAUTHENTICATED.1).map(|_| budget.accept(address(1))).collect();
        assert!(!one.iter().any(is_evicted));
        let _next = budget.accept(address(1));
        assert_eq!(one.iter().map(is_evicted).collect::<Vec<_>>()[..2], [true, false], "of its own address");
        let mut others: Vec<_> = (0..UNAUTHENTICATED.0).map(|n| budget.accept(address(2 + (n % 16) as u8))).collect();
        assert!(one.iter().all(is_evicted), "then of all");
        assert!(!is_evicted(&others[UNAUTHENTICATED.0 - 1]));
        others.clear();
        let again = budget.accept(address(1));
        assert!(!is_evicted(&again), "places are given back");
    }

    #[test]
    fn who_has_authenticated_stays() {
        let budget = ConnectionBudget::default();
        let first = budget.accept(address(1));
        first.authenticated();
        first.authenticated();
        let rest: Vec<_> = (0..2 * UNAUTHENTICATED.0).map(|n| budget.accept(address((n % 200) as u8))).collect();
        assert!(!is_evicted(&first));
        drop(rest);
        let mut slots: Vec<_> = (1..AUTHENTICATED.1)
            .map(|_| {
                let place = budget.accept(address(1));
                place.authenticated();
                place
            })
            .collect();
        assert!(!slots.iter().any(is_evicted));
        let beyond = budget.accept(address(1));
        beyond.authenticated();
        assert!(is_evicted(&beyond), "one address cannot take all");
        slots.pop();
        let fits = budget.accept(address(1));
        fits.authenticated();
        assert!(!is_evicted(&fits));
        drop((first, slots, beyond, fits));
        let table = budget.table();
        assert!(table.authenticated.is_empty() && table.unauthenticated.is_empty());
    }
}
