//! Conntrack netlink messages: list and delete tracked connections. Pure.
//!
//! Numbers are those of `linux/netfilter/nfnetlink_conntrack.h`.

use std::net::IpAddr;

use super::{
    message::{Attributes, Message},
    socket::Reply,
};

const SUBSYSTEM: u16 = 1;
const NEW: u16 = 0;
const GET: u16 = 1;
const DELETE: u16 = 2;
/// Size of `nfgenmsg`, bytes.
const HEAD: usize = 4;
const ORIGINAL: u16 = 1;
const REPLY: u16 = 2;
const ZONE: u16 = 18;
const FILTER: u16 = 25;

/// One direction (tuple) of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConntrackTuple {
    /// Source address.
    pub source: IpAddr,
    /// Destination address.
    pub destination: IpAddr,
    /// IP protocol number.
    pub protocol: u8,
    /// Destination port; 0 for a protocol without ports.
    pub port: u16,
}

/// An entry of the conntrack table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConntrackEntry {
    /// Original direction.
    pub original: ConntrackTuple,
    /// Reply direction.
    pub reply: ConntrackTuple,
    family: u8,
    tuple: Vec<u8>,
    zone: Option<Vec<u8>>,
}

impl ConntrackEntry {
    /// Whether this address is part of it, original or translated.
    pub fn has(&self, address: IpAddr) -> bool {
        let of = |d: &ConntrackTuple| d.source == address || d.destination == address;
        of(&self.original) || of(&self.reply)
    }

    /// Message that deletes the entry.
    pub fn delete_message(&self) -> Message {
        let message = Message::new(SUBSYSTEM << 8 | DELETE, 0, &[self.family, 0, 0, 0])
            .with_nest(ORIGINAL, |m| m.with_head(&self.tuple));
        match &self.zone {
            Some(zone) => message.with(ZONE, zone),
            None => message,
        }
    }
}

/// Role of an address in a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// It initiated the connection.
    Client,
    /// It replies, possibly behind another address (DNAT).
    Server,
}

fn family(is_v6: bool) -> u8 {
    if is_v6 { 10 } else { 2 }
}

/// Requests a dump of all connections, IPv4 and IPv6: one walk through the kernel's table.
pub fn list() -> Message {
    Message::new(SUBSYSTEM << 8 | GET, 0, &[0; HEAD])
}

/// Requests a dump of an address's connections. Kernels before 5.8 refuse it, or dump all.
pub fn list_of(address: IpAddr, end: End) -> Message {
    const BY_SOURCE: u32 = 1;
    let (tuple, original, reply) = match end {
        End::Client => (ORIGINAL, BY_SOURCE, 0),
        End::Server => (REPLY, 0, BY_SOURCE),
    };
    Message::new(SUBSYSTEM << 8 | GET, 0, &[family(address.is_ipv6()), 0, 0, 0])
        .with_nest(tuple, |m| {
            m.with_nest(1, |m| match address {
                IpAddr::V4(v4) => m.with(1, &v4.octets()),
                IpAddr::V6(v6) => m.with(3, &v6.octets()),
            })
        })
        .with_nest(FILTER, |m| m.with_u32(1, original).with_u32(2, reply))
}

/// Decodes a connection; `None` for another message type or missing attributes.
pub fn connection(reply: &Reply) -> Option<ConntrackEntry> {
    if reply.kind != SUBSYSTEM << 8 | NEW {
        return None;
    }
    let found = Attributes::behind(&reply.body, HEAD);
    Some(ConntrackEntry {
        original: direction(found.nest(ORIGINAL))?,
        reply: direction(found.nest(REPLY))?,
        family: *reply.body.first()?,
        tuple: found.get(ORIGINAL)?.to_vec(),
        zone: found.get(ZONE).map(<[u8]>::to_vec),
    })
}

fn direction(tuple: Attributes<'_>) -> Option<ConntrackTuple> {
    let (addresses, protocol) = (tuple.nest(1), tuple.nest(2));
    let v4 = |kind| <[u8; 4]>::try_from(addresses.get(kind)?).ok().map(IpAddr::from);
    let v6 = |kind| <[u8; 16]>::try_from(addresses.get(kind)?).ok().map(IpAddr::from);
    Some(ConntrackTuple {
        source: v4(1).or_else(|| v6(3))?,
        destination: v4(2).or_else(|| v6(4))?,
        protocol: *protocol.get(1)?.first()?,
        port: protocol.get(3).and_then(|b| b.try_into().ok()).map_or(0, u16::from_be_bytes),
    })
}
