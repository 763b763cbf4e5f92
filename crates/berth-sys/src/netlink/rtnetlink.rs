//! rtnetlink messages: encoder and decoder for links, addresses, routes, and qdiscs. Pure.
//!
//! Numbers are those of `linux/if_link.h`, `linux/rtnetlink.h`, `linux/if_bridge.h` and `linux/pkt_sched.h`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::message::{Attributes, CREATE, EXCLUSIVE, Message, REPLACE, u32_at};
use super::socket::Reply;

const NEW_LINK: u16 = 16;
const DELETE_LINK: u16 = 17;
const GET_LINK: u16 = 18;
const SET_LINK: u16 = 19;
const NEW_ADDRESS: u16 = 20;
const DELETE_ADDRESS: u16 = 21;
const GET_ADDRESS: u16 = 22;
const NEW_ROUTE: u16 = 24;
const GET_ROUTE: u16 = 26;
const NEW_QUEUE: u16 = 36;

const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_MASTER: u16 = 10;
const IFLA_OPERSTATE: u16 = 16;
const IFLA_LINKINFO: u16 = 18;
const IFLA_IFALIAS: u16 = 20;
const IFLA_NET_NS_FD: u16 = 28;
const INFO_KIND: u16 = 1;
const INFO_DATA: u16 = 2;
const INFO_SLAVE_KIND: u16 = 4;
const INFO_SLAVE_DATA: u16 = 5;
const BRIDGE_FORWARD_DELAY: u16 = 1;
const BRIDGE_STP: u16 = 5;
const BRIDGE_PORT_HAIRPIN: u16 = 4;
const VETH_PEER: u16 = 1;

const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_FLAGS: u16 = 8;
const NO_DUPLICATE_DETECTION: u32 = 0x02;

const RTA_DESTINATION: u16 = 1;
const RTA_LINK: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const TABLE_MAIN: u8 = 254;
const PROTOCOL_STATIC: u8 = 4;
const UNICAST: u8 = 1;

const UP: u32 = 1;
/// Operational states of a link that transmits: unknown, up.
const RUNNING: [u8; 2] = [0, 6];
const INET: u8 = 2;
const INET6: u8 = 10;

/// Size of `ifinfomsg`, bytes.
const LINK_HEAD: usize = 16;
/// Size of `ifaddrmsg`, bytes.
const ADDRESS_HEAD: usize = 8;
/// Size of `rtmsg`, bytes.
const ROUTE_HEAD: usize = 12;

/// Hardware (MAC) address of a link.
pub type Mac = [u8; 6];

/// A network interface of the queried namespace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Link {
    /// Interface index.
    pub index: u32,
    /// Interface name.
    pub name: String,
    /// Interface alias (`ifalias`).
    pub alias: String,
    /// Link kind, e.g. `veth`, `bridge`; empty for a physical device.
    pub kind: String,
    /// Interface index of the bridge it is a port of; 0 for none.
    pub master: u32,
    /// MTU, bytes.
    pub mtu: u32,
    /// Whether the link is administratively up.
    pub is_up: bool,
    /// Whether the link is operational; a link just set up becomes so a moment later. Kernels 6.8 and later update the
    /// state when it is queried.
    pub is_running: bool,
}

/// A route of the main routing table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Route {
    /// Destination prefix; `None` for a default route.
    pub destination: Option<IpAddr>,
    /// Prefix length, bits.
    pub prefix: u8,
    /// Output interface index; 0 for a multipath route.
    pub link: u32,
    /// Whether it is an IPv6 route.
    pub is_v6: bool,
}

fn link_head(index: u32, flags: u32, change: u32) -> [u8; LINK_HEAD] {
    let mut head = [0; LINK_HEAD];
    head[4..8].copy_from_slice(&index.to_ne_bytes());
    head[8..12].copy_from_slice(&flags.to_ne_bytes());
    head[12..16].copy_from_slice(&change.to_ne_bytes());
    head
}

/// Creates a bridge without STP and forwarding delay.
pub fn new_bridge(name: &str, mac: Mac, mtu: u32) -> Message {
    Message::new(NEW_LINK, CREATE | EXCLUSIVE, &link_head(0, 0, 0))
        .with_text(IFLA_IFNAME, name)
        .with(IFLA_ADDRESS, &mac)
        .with_u32(IFLA_MTU, mtu)
        .with_nest(IFLA_LINKINFO, |m| {
            m.with_text(INFO_KIND, "bridge")
                .with_nest(INFO_DATA, |m| m.with_u32(BRIDGE_FORWARD_DELAY, 0).with_u32(BRIDGE_STP, 0))
        })
}

/// Corrects an existing bridge: hardware address, MTU, no STP, up.
pub fn set_bridge(index: u32, mac: Mac, mtu: u32) -> Message {
    Message::new(NEW_LINK, 0, &link_head(index, UP, UP)).with(IFLA_ADDRESS, &mac).with_u32(IFLA_MTU, mtu).with_nest(
        IFLA_LINKINFO,
        |m| {
            m.with_text(INFO_KIND, "bridge")
                .with_nest(INFO_DATA, |m| m.with_u32(BRIDGE_FORWARD_DELAY, 0).with_u32(BRIDGE_STP, 0))
        },
    )
}

/// A veth pair: one end here as a bridge port, the other in another network namespace.
#[derive(Clone, Copy, Debug)]
pub struct VethPair<'a> {
    /// Interface name of the local end.
    pub name: &'a str,
    /// Interface index of the bridge.
    pub bridge: u32,
    /// Interface name of the peer.
    pub peer: &'a str,
    /// Hardware address of the peer.
    pub mac: Mac,
    /// Open descriptor of the peer's network namespace.
    pub namespace: i32,
    /// MTU of both ends, bytes.
    pub mtu: u32,
}

/// Creates a veth pair.
pub fn new_veth_pair(pair: &VethPair<'_>) -> Message {
    let namespace = pair.namespace.cast_unsigned();
    Message::new(NEW_LINK, CREATE | EXCLUSIVE, &link_head(0, 0, 0))
        .with_text(IFLA_IFNAME, pair.name)
        .with_u32(IFLA_MTU, pair.mtu)
        .with_u32(IFLA_MASTER, pair.bridge)
        .with_nest(IFLA_LINKINFO, |m| {
            m.with_text(INFO_KIND, "veth").with_nest(INFO_DATA, |m| {
                m.with_nest(VETH_PEER, |m| {
                    m.with_head(&link_head(0, 0, 0))
                        .with_text(IFLA_IFNAME, pair.peer)
                        .with(IFLA_ADDRESS, &pair.mac)
                        .with_u32(IFLA_MTU, pair.mtu)
                        .with_u32(IFLA_NET_NS_FD, namespace)
                })
            })
        })
}

/// Configures a bridge port: alias, hairpin mode (a pod reaches its own host port), up.
pub fn set_port(name: &str, alias: &str) -> Message {
    Message::new(NEW_LINK, 0, &link_head(0, UP, UP))
        .with_text(IFLA_IFNAME, name)
        .with(IFLA_IFALIAS, alias.as_bytes())
        .with_nest(IFLA_LINKINFO, |m| {
            m.with_text(INFO_SLAVE_KIND, "bridge").with_nest(INFO_SLAVE_DATA, |m| m.with(BRIDGE_PORT_HAIRPIN, &[1]))
        })
}

/// Sets a link up.
pub fn up(index: u32) -> Message {
    Message::new(SET_LINK, 0, &link_head(index, UP, UP))
}

/// Deletes a link by index.
pub fn delete_link(index: u32) -> Message {
    Message::new(DELETE_LINK, 0, &link_head(index, 0, 0))
}

/// Requests one link by name.
pub fn get_link(name: &str) -> Message {
    Message::new(GET_LINK, 0, &link_head(0, 0, 0)).with_text(IFLA_IFNAME, name)
}

/// Requests a dump of all links.
pub fn get_links() -> Message {
    Message::new(GET_LINK, 0, &link_head(0, 0, 0))
}

/// Decodes a link; `None` for another message type.
pub fn link(reply: &Reply) -> Option<Link> {
    if reply.kind != NEW_LINK {
        return None;
    }
    let found = Attributes::behind(&reply.body, LINK_HEAD);
    Some(Link {
        index: u32_at(&reply.body, 4)?,
        name: found.text(IFLA_IFNAME)?,
        alias: found.text(IFLA_IFALIAS).unwrap_or_default(),
        kind: found.nest(IFLA_LINKINFO).text(INFO_KIND).unwrap_or_default(),
        master: found.u32(IFLA_MASTER).unwrap_or(0),
        mtu: found.u32(IFLA_MTU).unwrap_or(0),
        is_up: u32_at(&reply.body, 8)? & UP != 0,
        is_running: found.get(IFLA_OPERSTATE).and_then(|state| state.first()).is_none_or(|s| RUNNING.contains(s)),
    })
}

fn family(of: IpAddr) -> u8 {
    if of.is_ipv4() { INET } else { INET6 }
}

fn octets(of: IpAddr) -> Vec<u8> {
    match of {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok().map(|b| Ipv4Addr::from(b).into()),
        16 => <[u8; 16]>::try_from(bytes).ok().map(|b| Ipv6Addr::from(b).into()),
        _ => None,
    }
}

fn address_message(kind: u16, flags: u16, link: u32, of: IpAddr, prefix: u8) -> Message {
    let mut head = [0; ADDRESS_HEAD];
    head[0] = family(of);
    head[1] = prefix;
    head[4..8].copy_from_slice(&link.to_ne_bytes());
    Message::new(kind, flags, &head).with(IFA_LOCAL, &octets(of)).with(IFA_ADDRESS, &octets(of))
}

/// Adds an address that is usable immediately: without duplicate address detection.
pub fn new_address(link: u32, of: IpAddr, prefix: u8) -> Message {
    let message = address_message(NEW_ADDRESS, CREATE | REPLACE, link, of, prefix);
    if of.is_ipv6() { message.with_u32(IFA_FLAGS, NO_DUPLICATE_DETECTION) } else { message }
}

/// Deletes an address of a link.
pub fn delete_address(link: u32, of: IpAddr, prefix: u8) -> Message {
    address_message(DELETE_ADDRESS, 0, link, of, prefix)
}

/// Requests a dump of all addresses.
pub fn get_addresses() -> Message {
    Message::new(GET_ADDRESS, 0, &[0; ADDRESS_HEAD])
}

/// Decodes an address: interface index, address, prefix length.
pub fn address_of(reply: &Reply) -> Option<(u32, IpAddr, u8)> {
    if reply.kind != NEW_ADDRESS {
        return None;
    }
    let found = Attributes::behind(&reply.body, ADDRESS_HEAD);
    let bytes = found.get(IFA_LOCAL).or_else(|| found.get(IFA_ADDRESS))?;
    Some((u32_at(&reply.body, 4)?, address(bytes)?, *reply.body.get(1)?))
}

/// Adds or replaces the default route via a gateway.
pub fn new_default_route(link: u32, gateway: IpAddr) -> Message {
    let mut head = [0; ROUTE_HEAD];
    head[0] = family(gateway);
    head[4] = TABLE_MAIN;
    head[5] = PROTOCOL_STATIC;
    head[7] = UNICAST;
    Message::new(NEW_ROUTE, CREATE | REPLACE, &head).with(RTA_GATEWAY, &octets(gateway)).with_u32(RTA_LINK, link)
}

/// Requests a dump of all IPv4 or all IPv6 routes.
pub fn get_routes(is_v6: bool) -> Message {
    let mut head = [0; ROUTE_HEAD];
    head[0] = if is_v6 { INET6 } else { INET };
    Message::new(GET_ROUTE, 0, &head)
}

/// Decodes a unicast route of the main table; `None` for any other.
pub fn route(reply: &Reply) -> Option<Route> {
    let head = reply.body.get(..ROUTE_HEAD)?;
    if reply.kind != NEW_ROUTE || head[4] != TABLE_MAIN || head[7] != UNICAST {
        return None;
    }
    let found = Attributes::behind(&reply.body, ROUTE_HEAD);
    Some(Route {
        destination: found.get(RTA_DESTINATION).and_then(address),
        prefix: head[1],
        link: found.u32(RTA_LINK).unwrap_or(0),
        is_v6: head[0] == INET6,
    })
}

/// Parameters of a token bucket filter qdisc.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TokenBucket {
    /// Rate, bytes per second.
    pub rate: u64,
    /// Bucket size, bytes.
    pub burst: u32,
    /// Queue limit, bytes.
    pub limit: u32,
}

/// Sets a token bucket filter as the root qdisc of a link, replacing any other.
pub fn set_bucket(link: u32, bucket: &TokenBucket) -> Message {
    const TCA_KIND: u16 = 1;
    const TCA_OPTIONS: u16 = 2;
    const TBF_PARAMETERS: u16 = 1;
    const TBF_RATE64: u16 = 4;
    const TBF_BURST: u16 = 6;
    const ROOT: u32 = 0xffff_ffff;
    const HANDLE: u32 = 1 << 16;
    /// Link layer Ethernet: otherwise the kernel requires a rate table.
    const ETHERNET: u8 = 1;
    let mut head = [0; 20];
    head[4..8].copy_from_slice(&link.to_ne_bytes());
    head[8..12].copy_from_slice(&HANDLE.to_ne_bytes());
    head[12..16].copy_from_slice(&ROOT.to_ne_bytes());
    let mut parameters = [0; 36];
    parameters[1] = ETHERNET;
    parameters[8..12].copy_from_slice(&u32::try_from(bucket.rate).unwrap_or(u32::MAX).to_ne_bytes());
    parameters[24..28].copy_from_slice(&bucket.limit.to_ne_bytes());
    Message::new(NEW_QUEUE, CREATE | REPLACE, &head).with_text(TCA_KIND, "tbf").with_nest(TCA_OPTIONS, |m| {
        let m = m.with(TBF_PARAMETERS, &parameters).with_u32(TBF_BURST, bucket.burst);
        if bucket.rate > u64::from(u32::MAX) { m.with(TBF_RATE64, &bucket.rate.to_ne_bytes()) } else { m }
    })
}

/// Deletes a neighbor (ARP or NDP) entry.
pub fn delete_neighbour(link: u32, of: IpAddr) -> Message {
    const DELETE_NEIGHBOUR: u16 = 29;
    const NDA_DESTINATION: u16 = 1;
    let mut head = [0; 12];
    head[0] = family(of);
    head[4..8].copy_from_slice(&link.to_ne_bytes());
    Message::new(DELETE_NEIGHBOUR, 0, &head).with(NDA_DESTINATION, &octets(of))
}

/// Attaches a link to a bridge as a port.
pub fn set_master(link: u32, bridge: u32) -> Message {
    Message::new(SET_LINK, 0, &link_head(link, UP, UP)).with_u32(IFLA_MASTER, bridge)
}

/// Name of the link whose removal a notification reports; `None` for other notifications.
pub fn removed_link(reply: &Reply) -> Option<String> {
    (reply.kind == DELETE_LINK).then(|| Attributes::behind(&reply.body, LINK_HEAD).text(IFLA_IFNAME)).flatten()
}

/// Multicast group of link notifications (`RTMGRP_LINK`), as a bit mask.
pub const LINK_NEWS: u32 = 1;
