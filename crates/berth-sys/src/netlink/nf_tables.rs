//! nf_tables netlink messages: encoder and decoder for tables, chains, sets, and rules. Pure.
//!
//! Callers decide which tables exist and what they do; this module provides tables, chains, sets, elements, and the
//! expressions of rules. Numbers are those of `linux/netfilter/nf_tables.h`. Registers are numbered from 0, four bytes
//! each.

use super::{
    message::{APPEND, Attributes, CREATE, EXCLUSIVE, Message},
    socket::Reply,
};

const SUBSYSTEM: u16 = 10;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
const NEW_TABLE: u16 = 0;
const GET_TABLE: u16 = 1;
const DELETE_TABLE: u16 = 2;
const NEW_CHAIN: u16 = 3;
const GET_CHAIN: u16 = 4;
const DELETE_CHAIN: u16 = 5;
const NEW_RULE: u16 = 6;
const GET_RULE: u16 = 7;
const DELETE_RULE: u16 = 8;
const NEW_SET: u16 = 9;
const DELETE_SET: u16 = 11;
const NEW_ELEMENT: u16 = 12;
const DELETE_ELEMENT: u16 = 14;

/// `NFPROTO_INET`: IPv4 and IPv6 in one table.
pub const FAMILY_INET: u8 = 1;
/// `NFPROTO_UNSPEC`: all families, for dumps.
pub const FAMILY_ANY: u8 = 0;
/// Size of `nfgenmsg`, bytes.
const HEAD: usize = 4;
const ITEM: u16 = 1;
/// Multicast group of nf_tables changes (`NFNLGRP_NFTABLES`), as a bit mask.
pub const NEWS: u32 = 1 << (7 - 1);

fn message(kind: u16, flags: u16, family: u8) -> Message {
    Message::new(SUBSYSTEM << 8 | kind, flags, &[family, 0, 0, 0])
}

/// Begin and end message of a batch (transaction).
pub fn batch_messages() -> (Message, Message) {
    let mark = |kind| Message::new(kind, 0, &[0, 0, 0, SUBSYSTEM as u8]);
    (mark(BATCH_BEGIN), mark(BATCH_END))
}

/// Creates a table; an existing table is unchanged.
pub fn new_table(name: &str) -> Message {
    message(NEW_TABLE, CREATE, FAMILY_INET).with_text(1, name).with_be32(2, 0)
}

/// Deletes a table with all its chains, sets, and rules.
pub fn delete_table(name: &str) -> Message {
    message(DELETE_TABLE, 0, FAMILY_INET).with_text(1, name)
}

/// Requests a table.
pub fn get_table(name: &str) -> Message {
    message(GET_TABLE, 0, FAMILY_INET).with_text(1, name)
}

/// Netfilter hook of a base chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NetfilterHook {
    /// On arrival, before routing.
    Prerouting,
    /// Forwarded to another machine.
    Forward,
    /// Sent by a local process.
    Output,
    /// Before leaving, after routing.
    Postrouting,
}

impl NetfilterHook {
    fn number(self) -> u32 {
        match self {
            Self::Prerouting => 0,
            Self::Forward => 2,
            Self::Output => 3,
            Self::Postrouting => 4,
        }
    }
}

/// Creates a base chain with policy accept. `kind` is `nat` or `filter`.
pub fn new_chain(table: &str, name: &str, kind: &str, hook: NetfilterHook, priority: i32) -> Message {
    const ACCEPT: u32 = 1;
    message(NEW_CHAIN, CREATE, FAMILY_INET)
        .with_text(1, table)
        .with_text(3, name)
        .with_nest(4, |m| m.with_be32(1, hook.number()).with_be32(2, priority.cast_unsigned()))
        .with_be32(5, ACCEPT)
        .with_text(7, kind)
}

/// Requests a dump of all chains of a family.
pub fn get_chains(family: u8) -> Message {
    message(GET_CHAIN, 0, family)
}

/// An existing chain.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chain {
    /// Address family of its table.
    pub family: u8,
    /// Name of its table.
    pub table: String,
    /// Name of the chain.
    pub name: String,
    /// Netfilter hook number; `None` for a regular chain.
    pub hook: Option<u32>,
    /// Whether it is a base chain with policy drop.
    pub drops: bool,
}

/// Decodes a chain; `None` for another message type or missing attributes.
pub fn chain(reply: &Reply) -> Option<Chain> {
    if reply.kind != SUBSYSTEM << 8 | NEW_CHAIN {
        return None;
    }
    let found = Attributes::behind(&reply.body, HEAD);
    Some(Chain {
        family: *reply.body.first()?,
        table: found.text(1)?,
        name: found.text(3)?,
        hook: found.nest(4).be32(1),
        drops: found.be32(5) == Some(0) && found.get(4).is_some(),
    })
}

impl Chain {
    /// Whether the chain is attached to the forward hook.
    pub fn forwards(&self) -> bool {
        self.hook == Some(NetfilterHook::Forward.number())
    }
}

/// Requests a dump of all rules of family `inet`.
pub fn get_rules() -> Message {
    message(GET_RULE, 0, FAMILY_INET)
}

/// Table and chain of a dumped rule; `None` for other message types.
pub fn rule_location(reply: &Reply) -> Option<(String, String)> {
    let found = Attributes::behind(&reply.body, HEAD);
    (reply.kind == SUBSYSTEM << 8 | NEW_RULE).then_some((found.text(1)?, found.text(2)?))
}

/// Whether a notification reports the removal of this table or of a part of it.
pub fn removes_from(reply: &Reply, table: &str) -> bool {
    let removals = [DELETE_TABLE, DELETE_CHAIN, DELETE_RULE, DELETE_SET];
    // In all four message types, attribute 1 is the name of the table.
    removals.iter().any(|kind| reply.kind == SUBSYSTEM << 8 | kind)
        && Attributes::behind(&reply.body, HEAD).text(1).as_deref() == Some(table)
}

/// An nf_tables set or map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Set<'a> {
    /// Name of the set.
    pub name: &'a str,
    /// Types of the fields of a (concatenated) key.
    pub key: &'a [Type],
    /// Types of the fields of a value; empty for a set.
    pub value: &'a [Type],
    /// Whether elements are intervals.
    pub is_interval: bool,
}

/// Data type of a key or value field. The numbers only serve people who list the rules (`nft list`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Type {
    /// IPv4 address.
    Ipv4,
    /// IPv6 address.
    Ipv6,
    /// Transport protocol: `tcp`, `udp`.
    Protocol,
    /// Transport port.
    Port,
}

impl Type {
    fn number(self) -> u32 {
        match self {
            Self::Ipv4 => 7,
            Self::Ipv6 => 8,
            Self::Protocol => 12,
            Self::Port => 13,
        }
    }

    /// Size in a key, bytes, padded to a multiple of four.
    fn length(self) -> u32 {
        if self == Self::Ipv6 { 16 } else { 4 }
    }
}

fn type_of(parts: &[Type]) -> (u32, u32) {
    parts.iter().fold((0, 0), |(number, length), part| (number << 6 | part.number(), length + part.length()))
}

/// Creates a set or map; `id` identifies it within the transaction.
pub fn new_set(table: &str, set: &Set<'_>, id: u32) -> Message {
    const INTERVAL: u32 = 4;
    const MAP: u32 = 8;
    let flags = if set.is_interval { INTERVAL } else { 0 } | if set.value.is_empty() { 0 } else { MAP };
    let (key, key_length) = type_of(set.key);
    let message = message(NEW_SET, CREATE, FAMILY_INET)
        .with_text(1, table)
        .with_text(2, set.name)
        .with_be32(3, flags)
        .with_be32(4, key)
        .with_be32(5, key_length)
        .with_be32(10, id);
    if set.value.is_empty() {
        return message;
    }
    let (value, value_length) = type_of(set.value);
    message.with_be32(6, value).with_be32(7, value_length)
}

/// An element of a set or map.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Element {
    /// Key, each field padded to four bytes.
    pub key: Vec<u8>,
    /// Value; `None` in sets.
    pub value: Option<Vec<u8>>,
    /// Whether the key is the exclusive end of an interval.
    pub ends_range: bool,
}

/// Maximum number of elements per message.
const ELEMENTS: usize = 250;

/// Adds elements; fails on an existing key.
pub fn new_elements(table: &str, set: &str, elements: &[Element]) -> Vec<Message> {
    element_messages(NEW_ELEMENT, CREATE | EXCLUSIVE, table, set, elements)
}

/// Deletes elements; fails on a missing key.
pub fn delete_elements(table: &str, set: &str, elements: &[Element]) -> Vec<Message> {
    element_messages(DELETE_ELEMENT, 0, table, set, elements)
}

fn element_messages(kind: u16, flags: u16, table: &str, set: &str, elements: &[Element]) -> Vec<Message> {
    let one = |m: Message, element: &Element| {
        m.with_nest(ITEM, |m| {
            let m = m.with_nest(1, |m| m.with(1, &element.key));
            let m = match &element.value {
                Some(value) if kind == NEW_ELEMENT => m.with_nest(2, |m| m.with(1, value)),
                _ => m,
            };
            if element.ends_range { m.with_be32(3, 1) } else { m }
        })
    };
    let chunks = elements.chunks(ELEMENTS);
    chunks
        .map(|chunk| {
            message(kind, flags, FAMILY_INET)
                .with_text(1, table)
                .with_text(2, set)
                .with_nest(3, |m| chunk.iter().fold(m, one))
        })
        .collect()
}

/// Appends a rule to a chain.
pub fn new_rule(table: &str, chain: &str, expressions: &[Expression<'_>]) -> Message {
    message(NEW_RULE, CREATE | APPEND, FAMILY_INET).with_text(1, table).with_text(2, chain).with_nest(4, |m| {
        expressions.iter().fold(m, |m, expression| {
            m.with_nest(ITEM, |m| m.with_text(1, expression.name()).with_nest(2, |m| expression.fill(m)))
        })
    })
}

/// Packet metadata that a rule can load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Meta {
    /// Name of the input interface: 16 bytes.
    InputName,
    /// Name of the output interface: 16 bytes.
    OutputName,
    /// Address family: one byte.
    Family,
    /// Transport protocol: one byte.
    Protocol,
}

/// Header that a payload offset is relative to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Base {
    /// The IP header.
    Network,
    /// The transport header.
    Transport,
}

/// An expression of a rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Expression<'a> {
    /// Loads metadata into a register.
    Meta(Meta, u32),
    /// Loads bytes of the packet: base, offset, length, register.
    Payload(Base, u32, u32, u32),
    /// Loads the local address type of the destination (`fib daddr type`).
    DestinationType(u32),
    /// Loads the conntrack status bits.
    Status(u32),
    /// Loads the conntrack state bits.
    State(u32),
    /// Masks a register: register, bits to keep.
    And(u32, u32),
    /// Continues if the register equals the value.
    Is(u32, &'a [u8]),
    /// Continues if the register differs from the value.
    IsNot(u32, &'a [u8]),
    /// Continues if the set contains the register's value.
    In(u32, &'a str),
    /// Continues if the set does not contain the register's value.
    NotIn(u32, &'a str),
    /// Replaces the register's value by its map entry; ends the rule if the key is missing.
    Map(u32, &'a str),
    /// Destination NAT: family, register of the address, register of the port.
    Redirect(u8, u32, u32),
    /// Source NAT to the address of the output interface.
    Masquerade {
        /// Whether source ports are chosen at random (`fully-random`).
        random: bool,
    },
    /// Accepts the packet in this chain.
    Accept,
    /// Drops the packet.
    Drop,
}

impl Expression<'_> {
    fn name(&self) -> &'static str {
        match self {
            Self::Meta(..) => "meta",
            Self::Payload(..) => "payload",
            Self::DestinationType(_) => "fib",
            Self::Status(_) | Self::State(_) => "ct",
            Self::And(..) => "bitwise",
            Self::Is(..) | Self::IsNot(..) => "cmp",
            Self::In(..) | Self::NotIn(..) | Self::Map(..) => "lookup",
            Self::Redirect(..) => "nat",
            Self::Masquerade { .. } => "masq",
            Self::Accept | Self::Drop => "immediate",
        }
    }

    fn fill(&self, m: Message) -> Message {
        /// Number of the first four-byte register (`NFT_REG32_00`).
        const WORDS: u32 = 8;
        const STATE: u32 = 0;
        const STATUS: u32 = 2;
        const RANDOM_FULLY: u32 = 16;
        let compare = |m: Message, r: u32, op: u32, v: &[u8]| {
            m.with_be32(1, WORDS + r).with_be32(2, op).with_nest(3, |m| m.with(1, v))
        };
        let verdict =
            |m: Message, code: u32| m.with_be32(1, 0).with_nest(2, |m| m.with_nest(2, |m| m.with_be32(1, code)));
        match *self {
            Self::Meta(what, r) => m.with_be32(1, WORDS + r).with_be32(2, what.number()),
            Self::Payload(base, at, length, r) => {
                let base = if base == Base::Network { 1 } else { 2 };
                m.with_be32(1, WORDS + r).with_be32(2, base).with_be32(3, at).with_be32(4, length)
            }
            // Result `NFT_FIB_RESULT_ADDRTYPE`, flag `NFTA_FIB_F_DADDR`.
            Self::DestinationType(r) => m.with_be32(1, WORDS + r).with_be32(2, 3).with_be32(3, 2),
            Self::Status(r) => m.with_be32(1, WORDS + r).with_be32(2, STATUS),
            Self::State(r) => m.with_be32(1, WORDS + r).with_be32(2, STATE),
            Self::And(r, bits) => m
                .with_be32(1, WORDS + r)
                .with_be32(2, WORDS + r)
                .with_be32(3, 4)
                .with_nest(4, |m| m.with_u32(1, bits))
                .with_nest(5, |m| m.with_u32(1, 0)),
            Self::Is(r, value) => compare(m, r, 0, value),
            Self::IsNot(r, value) => compare(m, r, 1, value),
            Self::In(r, set) => m.with_text(1, set).with_be32(2, WORDS + r),
            Self::NotIn(r, set) => m.with_text(1, set).with_be32(2, WORDS + r).with_be32(5, 1),
            Self::Map(r, map) => m.with_text(1, map).with_be32(2, WORDS + r).with_be32(3, WORDS + r),
            Self::Redirect(family, address, port) => m
                .with_be32(1, 1)
                .with_be32(2, u32::from(family))
                .with_be32(3, WORDS + address)
                .with_be32(5, WORDS + port),
            Self::Masquerade { random: true } => m.with_be32(1, RANDOM_FULLY),
            Self::Masquerade { random: false } => m,
            Self::Accept => verdict(m, 1),
            Self::Drop => verdict(m, 0),
        }
    }
}

impl Meta {
    fn number(self) -> u32 {
        match self {
            Self::InputName => 6,
            Self::OutputName => 7,
            Self::Family => 15,
            Self::Protocol => 16,
        }
    }
}
