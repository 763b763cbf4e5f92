//! Connection order of resolved addresses (Happy Eyeballs). Pure.
//!
//! Implements RFC 8305 §4.

use std::net::SocketAddr;

/// Maximum number of addresses tried.
const MOST: usize = 16;

/// Interleaves the address families, starting with that of the first address, so that a broken family delays nothing.
pub fn ordered(addresses: impl IntoIterator<Item = SocketAddr>) -> Vec<SocketAddr> {
    let mut all: Vec<SocketAddr> = Vec::new();
    for address in addresses {
        if !all.contains(&address) {
            all.push(address);
        }
    }
    let starts_with = all.first().is_some_and(SocketAddr::is_ipv6);
    let (first, second): (Vec<_>, Vec<_>) = all.into_iter().partition(|address| address.is_ipv6() == starts_with);
    let (mut first, mut second) = (first.into_iter(), second.into_iter());
    let mut ordered = Vec::new();
    while ordered.len() < MOST {
        let pair = [first.next(), second.next()];
        if pair.iter().all(Option::is_none) {
            break;
        }
        ordered.extend(pair.into_iter().flatten());
    }
    ordered.truncate(MOST);
    ordered
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_take_turns() {
        let order = |addresses: &[&str]| {
            let parsed = addresses.iter().map(|address| address.parse().expect("an address"));
            ordered(parsed).iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(
            order(&["[::1]:1", "[::2]:1", "[::1]:1", "1.1.1.1:1", "1.1.1.2:1", "1.1.1.3:1"]),
            ["[::1]:1", "1.1.1.1:1", "[::2]:1", "1.1.1.2:1", "1.1.1.3:1"]
        );
        assert_eq!(order(&["1.1.1.1:1", "[::1]:1"]), ["1.1.1.1:1", "[::1]:1"]);
        assert_eq!(ordered((0..40).map(|port| SocketAddr::from(([1, 1, 1, 1], port)))).len(), MOST);
        assert_eq!(order(&[]), [""; 0]);
    }
}
