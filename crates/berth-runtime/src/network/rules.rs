//! Desired content of the runtime's nf_tables table.
//!
//! | Chain | Purpose |
//! |---|---|
//! | `pre`, `out` | redirect host ports to their pods |
//! | `post` | masquerade traffic that leaves for other destinations |
//! | `guard` | keep pods from the host's loopback, which `route_localnet` would allow (CVE-2020-8558) |
//! | `fwd` | accept packets from and to pods |
//!
//! The table has no owner in the kernel's sense, so it survives the daemon. `[::1]:port` cannot be redirected: the
//! kernel does not route packets from there. Contains only functions of values. Implements spec 09b §12.

use std::net::IpAddr;

use berth_sys::netlink::{
    Message,
    nf_tables::{self, Base, Element, Expression as E, Meta, NetfilterHook, Set, Type},
};

use super::{
    cidr::{self, Cidr},
    host_ports::HostPortEntry,
};

const IPV4: u8 = 2;
const IPV6: u8 = 10;
/// `RTN_LOCAL`: address type of the host's own addresses.
const LOCAL: [u8; 4] = 2_u32.to_ne_bytes();
/// Conntrack status bit of destination NAT.
const REDIRECTED: u32 = 1 << 5;
/// Conntrack state bits `established` and `related`.
const ESTABLISHED: u32 = 0b110;
const ZERO: [u8; 4] = [0; 4];

/// Chain names of the table.
pub const CHAINS: [&str; 5] = ["pre", "out", "post", "guard", "fwd"];

/// Inputs of the table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rules {
    /// Table name.
    pub table: String,
    /// Bridge name.
    pub bridge: String,
    /// Source ranges of pods.
    pub pods: Vec<Cidr>,
    /// Destinations without masquerading.
    pub no_masquerade: Vec<Cidr>,
    /// Whether traffic from pods to other destinations is masqueraded with the host's address.
    pub masquerade: bool,
}

/// Constants of an IP version.
struct IpVersion {
    is_v6: bool,
    family: u8,
    /// Header offsets of the source and destination address, and their length, bytes.
    source: u32,
    destination: u32,
    length: u32,
    address: Type,
    /// Set names: pods, no masquerading, host ports, host ports bound to one address.
    sets: [&'static str; 4],
}

const VERSIONS: [IpVersion; 2] = [
    IpVersion {
        is_v6: false,
        family: IPV4,
        source: 12,
        destination: 16,
        length: 4,
        address: Type::Ipv4,
        sets: ["pod4", "nomasq4", "hp4", "hp4ip"],
    },
    IpVersion {
        is_v6: true,
        family: IPV6,
        source: 8,
        destination: 24,
        length: 16,
        address: Type::Ipv6,
        sets: ["pod6", "nomasq6", "hp6", "hp6ip"],
    },
];

/// Messages that replace the whole table.
pub fn whole(rules: &Rules, entries: &[HostPortEntry]) -> Vec<Message> {
    let table = rules.table.as_str();
    // Creates the table first, so that deleting it cannot fail.
    let mut all = vec![nf_tables::new_table(table), nf_tables::delete_table(table), nf_tables::new_table(table)];
    for (place, version) in VERSIONS.iter().enumerate() {
        let first = u32::try_from(place * 4).unwrap_or(0);
        all.extend(sets(version).iter().zip(first..).map(|(set, id)| nf_tables::new_set(table, set, id + 1)));
    }
    all.push(nf_tables::new_chain(table, "pre", "nat", NetfilterHook::Prerouting, -100));
    all.push(nf_tables::new_chain(table, "out", "nat", NetfilterHook::Output, -100));
    all.push(nf_tables::new_chain(table, "post", "nat", NetfilterHook::Postrouting, 100));
    all.push(nf_tables::new_chain(table, "guard", "filter", NetfilterHook::Prerouting, -300));
    all.push(nf_tables::new_chain(table, "fwd", "filter", NetfilterHook::Forward, 0));
    all.extend(chains(rules));
    for version in &VERSIONS {
        all.extend(nf_tables::new_elements(table, version.sets[0], &ranges(&rules.pods, version)));
        all.extend(nf_tables::new_elements(table, version.sets[1], &ranges(&rules.no_masquerade, version)));
    }
    all.extend(added(table, entries));
    all
}

fn sets(version: &IpVersion) -> [Set<'static>; 4] {
    let [pods, no_masquerade, ports, ports_of] = version.sets;
    let range = |name| Set {
        name,
        key: if version.is_v6 { &[Type::Ipv6] } else { &[Type::Ipv4] },
        value: &[],
        is_interval: true,
    };
    let map = |name, key| Set {
        name,
        key,
        value: if version.is_v6 { &[Type::Ipv6, Type::Port] } else { &[Type::Ipv4, Type::Port] },
        is_interval: false,
    };
    let keyed: &[Type] = match version.address {
        Type::Ipv6 => &[Type::Ipv6, Type::Protocol, Type::Port],
        _ => &[Type::Ipv4, Type::Protocol, Type::Port],
    };
    [range(pods), range(no_masquerade), map(ports, &[Type::Protocol, Type::Port]), map(ports_of, keyed)]
}

/// Rules in the order of [`CHAINS`].
fn chains(rules: &Rules) -> Vec<Message> {
    let table = rules.table.as_str();
    let mut all = Vec::new();
    for chain in ["pre", "out"] {
        all.extend(VERSIONS.iter().flat_map(|version| redirections(table, chain, version)));
    }
    let bridge = link_name(&rules.bridge);
    let loopback =
        |at| [E::Meta(Meta::Family, 0), E::Is(0, &[IPV4]), E::Payload(Base::Network, at, 1, 0), E::Is(0, &[127])];
    let from_loopback: Vec<E<'_>> = loopback(12)
        .into_iter()
        .chain([E::Meta(Meta::OutputName, 0), E::Is(0, &bridge), E::Masquerade { random: false }])
        .collect();
    all.push(nf_tables::new_rule(table, "post", &from_loopback));
    for version in &VERSIONS {
        all.extend(masquerading(rules, &bridge, version));
    }
    let guard: Vec<E<'_>> =
        [E::Meta(Meta::InputName, 0), E::Is(0, &bridge)].into_iter().chain(loopback(16)).chain([E::Drop]).collect();
    all.push(nf_tables::new_rule(table, "guard", &guard));
    let known = [E::State(0), E::And(0, ESTABLISHED), E::IsNot(0, &ZERO), E::Accept];
    all.push(nf_tables::new_rule(table, "fwd", &known));
    for side in [Meta::InputName, Meta::OutputName] {
        all.push(nf_tables::new_rule(table, "fwd", &[E::Meta(side, 0), E::Is(0, &bridge), E::Accept]));
    }
    all
}

/// Redirects packets to a local address and a host port.
fn redirections(table: &str, chain: &str, version: &IpVersion) -> [Message; 2] {
    let [_, _, ports, ports_of] = version.sets;
    let words = version.length / 4;
    let is_version = [version.family];
    let mut local = vec![E::Meta(Meta::Family, 0), E::Is(0, &is_version)];
    let loopback = std::net::Ipv6Addr::LOCALHOST.octets();
    if version.is_v6 {
        local.extend([E::Payload(Base::Network, version.destination, version.length, 0), E::IsNot(0, &loopback)]);
    }
    local.extend([E::DestinationType(0), E::Is(0, &LOCAL)]);
    let to = E::Redirect(version.family, 0, words);
    let narrow = [
        E::Payload(Base::Network, version.destination, version.length, 0),
        E::Meta(Meta::Protocol, words),
        E::Payload(Base::Transport, 2, 2, words + 1),
        E::Map(0, ports_of),
        to,
    ];
    let wide = [E::Meta(Meta::Protocol, 0), E::Payload(Base::Transport, 2, 2, 1), E::Map(0, ports), to];
    [
        nf_tables::new_rule(table, chain, &[local.as_slice(), &narrow].concat()),
        nf_tables::new_rule(table, chain, &[local.as_slice(), &wide].concat()),
    ]
}

/// Masquerades hairpin traffic (pod to pod through a host port, possibly to itself) and traffic to other destinations.
fn masquerading(rules: &Rules, bridge: &[u8], version: &IpVersion) -> Vec<Message> {
    let [pods, no_masquerade, ..] = version.sets;
    let family = [version.family];
    let source = E::Payload(Base::Network, version.source, version.length, 0);
    let destination = E::Payload(Base::Network, version.destination, version.length, 0);
    let is_version = [E::Meta(Meta::Family, 0), E::Is(0, &family)];
    let redirected = [E::Status(0), E::And(0, REDIRECTED), E::IsNot(0, &ZERO)];
    let between = [source, E::In(0, pods), destination, E::In(0, pods), E::Masquerade { random: false }];
    let hairpin = nf_tables::new_rule(&rules.table, "post", &[&redirected[..], &is_version, &between].concat());
    if !rules.masquerade {
        return vec![hairpin];
    }
    let leaving = [
        source,
        E::In(0, pods),
        destination,
        E::NotIn(0, no_masquerade),
        E::Meta(Meta::OutputName, 0),
        E::IsNot(0, bridge),
        E::Masquerade { random: true },
    ];
    vec![hairpin, nf_tables::new_rule(&rules.table, "post", &[&is_version[..], &leaving].concat())]
}

/// Number of rules in all chains.
pub fn count(rules: &Rules) -> usize {
    chains(rules).len()
}

fn ranges(nets: &[Cidr], version: &IpVersion) -> Vec<Element> {
    let mut elements = Vec::new();
    for (first, last) in cidr::ranges(nets, version.is_v6) {
        elements.push(Element { key: cidr::octets(first), value: None, ends_range: false });
        if let Some(end) = cidr::successor(last) {
            elements.push(Element { key: cidr::octets(end), value: None, ends_range: true });
        }
    }
    elements
}

/// Messages that add host ports.
pub fn added(table: &str, entries: &[HostPortEntry]) -> Vec<Message> {
    by_map(entries).into_iter().flat_map(|(map, elements)| nf_tables::new_elements(table, map, &elements)).collect()
}

/// Messages that remove host ports.
pub fn removed(table: &str, entries: &[HostPortEntry]) -> Vec<Message> {
    by_map(entries).into_iter().flat_map(|(map, elements)| nf_tables::delete_elements(table, map, &elements)).collect()
}

fn by_map(entries: &[HostPortEntry]) -> Vec<(&'static str, Vec<Element>)> {
    let mut maps = Vec::new();
    for version in &VERSIONS {
        for (is_narrow, map) in [(false, version.sets[2]), (true, version.sets[3])] {
            let chosen =
                entries.iter().filter(|e| e.key.is_v6 == version.is_v6 && e.key.address.is_some() == is_narrow);
            let elements: Vec<Element> = chosen.map(element).collect();
            if !elements.is_empty() {
                maps.push((map, elements));
            }
        }
    }
    maps
}

fn element(entry: &HostPortEntry) -> Element {
    let port = |port: u16| [&port.to_be_bytes()[..], &[0, 0]].concat();
    let address = |address: Option<IpAddr>| address.map(cidr::octets).unwrap_or_default();
    let key =
        [&address(entry.key.address)[..], &[entry.key.protocol.number(), 0, 0, 0], &port(entry.key.port)].concat();
    let value = [&cidr::octets(entry.pod)[..], &port(entry.port)].concat();
    Element { key, value: Some(value), ends_range: false }
}

fn link_name(name: &str) -> [u8; 16] {
    let mut padded = [0; 16];
    for (to, from) in padded.iter_mut().zip(name.bytes().take(15)) {
        *to = from;
    }
    padded
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::host_ports::{HostPortKey, TransportProtocol};

    #[test]
    fn host_ports_are_elements() {
        let key = HostPortKey { is_v6: false, address: None, protocol: TransportProtocol::Tcp, port: 80 };
        let entry = HostPortEntry { key, pod: "10.0.0.2".parse().expect("an address"), port: 8080 };
        let made = element(&entry);
        assert_eq!(made.key, [6, 0, 0, 0, 0, 80, 0, 0]);
        assert_eq!(made.value.expect("a value"), [10, 0, 0, 2, 0x1f, 0x90, 0, 0]);
        let narrow = HostPortEntry { key: HostPortKey { address: Some([1, 2, 3, 4].into()), ..key }, ..entry };
        assert_eq!(element(&narrow).key, [1, 2, 3, 4, 6, 0, 0, 0, 0, 80, 0, 0]);
        let maps: Vec<&str> = by_map(&[entry, narrow]).into_iter().map(|(map, _)| map).collect();
        assert_eq!(maps, ["hp4", "hp4ip"]);
    }

    #[test]
    fn a_range_at_the_very_end_has_no_end() {
        let nets = ["240.0.0.0/4".parse().expect("a net"), "10.0.0.0/8".parse().expect("a net")];
        let elements: Vec<(Vec<u8>, bool)> =
            ranges(&nets, &VERSIONS[0]).into_iter().map(|e| (e.key, e.ends_range)).collect();
        assert_eq!(elements, [(vec![10, 0, 0, 0], false), (vec![11, 0, 0, 0], true), (vec![240, 0, 0, 0], false)]);
    }
}
