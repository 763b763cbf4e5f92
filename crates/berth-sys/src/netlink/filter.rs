//! The kernel's packet filter (nf_tables), as messages and from them. Pure.
//!
//! What tables there are and what they do is decided elsewhere; here are the words: tables, chains, sets, elements and the
//! expressions rules are made of. Numbers are those of `linux/netfilter/nf_tables.h`. Registers count in words of four
//! bytes from 0.

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

/// Both versions of the internet protocol at once.
pub const FAMILY_INET: u8 = 1;
/// Every family, where things are listed.
pub const FAMILY_ANY: u8 = 0;
/// Bytes of `nfgenmsg`.
const HEAD: usize = 4;
const ITEM: u16 = 1;
/// Group of the news of packet filters, as a bit.
pub const NEWS: u32 = 1 << (7 - 1);

fn message(kind: u16, flags: u16, family: u8) -> Message {
    Message::new(SUBSYSTEM << 8 | kind, flags, &[family, 0, 0, 0])
}

/// The marks a transaction stands between.
pub fn marks() -> (Message, Message) {
    let mark = |kind| Message::new(kind, 0, &[0, 0, 0, SUBSYSTEM as u8]);
    (mark(BATCH_BEGIN), mark(BATCH_END))
}

/// Makes a table; one that is there stays.
pub fn new_table(name: &str) -> Message {
    message(NEW_TABLE, CREATE, FAMILY_INET).with_text(1, name).with_be32(2, 0)
}

/// Removes a table with all it holds.
pub fn delete_table(name: &str) -> Message {
    message(DELETE_TABLE, 0, FAMILY_INET).with_text(1, name)
}

/// Asks for a table.
pub fn get_table(name: &str) -> Message {
    message(GET_TABLE, 0, FAMILY_INET).with_text(1, name)
}

/// Where packets meet a chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hook {
    /// As they arrive.
    Prerouting,
    /// On their way to another machine.
    Forward,
    /// As a process here sends them.
    Output,
    /// As they leave.
    Postrouting,
}

impl Hook {
    fn number(self) -> u32 {
        match self {
            Self::Prerouting => 0,
            Self::Forward => 2,
            Self::Output => 3,
            Self::Postrouting => 4,
        }
    }
}

/// Makes a chain that lets pass what no rule of it holds. `kind` is `nat` or `filter`.
pub fn new_chain(table: &str, name: &str, kind: &str, hook: Hook, priority: i32) -> Message {
    const ACCEPT: u32 = 1;
    message(NEW_CHAIN, CREATE, FAMILY_INET)
        .with_text(1, table)
        .with_text(3, name)
        .with_nest(4, |m| m.with_be32(1, hook.number()).with_be32(2, priority.cast_unsigned()))
        .with_be32(5, ACCEPT)
        .with_text(7, kind)
}

/// Asks for all chains of a family.
pub fn get_chains(family: u8) -> Message {
    message(GET_CHAIN, 0, family)
}

/// A chain that is there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chain {
    /// The table's family.
    pub family: u8,
    /// The table.
    pub table: String,
    /// Its name.
    pub name: String,
    /// The hook's number, where it has one.
    pub hook: Option<u32>,
    /// Whether what no rule holds is dropped.
    pub drops: bool,
}

/// Reads a chain.
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
    /// Whether packets for other machines meet it.
    pub fn forwards(&self) -> bool {
        self.hook == Some(Hook::Forward.number())
    }
}

/// Asks for all rules.
pub fn get_rules() -> Message {
    message(GET_RULE, 0, FAMILY_INET)
}

/// The table and the chain of a rule that is listed.
pub fn rule_of(reply: &Reply) -> Option<(String, String)> {
    let found = Attributes::behind(&reply.body, HEAD);
    (reply.kind == SUBSYSTEM << 8 | NEW_RULE).then_some((found.text(1)?, found.text(2)?))
}

/// Whether a piece of news tells that something of this table was removed.
pub fn removes_of(reply: &Reply, table: &str) -> bool {
    let removals = [DELETE_TABLE, DELETE_CHAIN, DELETE_RULE, DELETE_SET];
    // In all four kinds the table's name is attribute 1.
    removals.iter().any(|kind| reply.kind == SUBSYSTEM << 8 | kind)
        && Attributes::behind(&reply.body, HEAD).text(1).as_deref() == Some(table)
}

/// A set or a map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Set<'a> {
    /// Its name.
    pub name: &'a str,
    /// Types of the parts of a key.
    pub key: &'a [Type],
    /// Types of the parts of a value; empty for a set.
    pub value: &'a [Type],
    /// Whether elements are ranges.
    pub is_interval: bool,
}

/// What a part of a key or value is. The numbers are for people who list the rules.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Type {
    /// An address of version 4.
    Ipv4,
    /// An address of version 6.
    Ipv6,
    /// `tcp`, `udp`.
    Protocol,
    /// A port.
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

    /// Bytes in a key, padded.
    fn length(self) -> u32 {
        if self == Self::Ipv6 { 16 } else { 4 }
    }
}

fn type_of(parts: &[Type]) -> (u32, u32) {
    parts.iter().fold((0, 0), |(number, length), part| (number << 6 | part.number(), length + part.length()))
}

/// Makes a set or a map; `id` is its own within the transaction.
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
    /// Its key, each part padded to four bytes.
    pub key: Vec<u8>,
    /// Its value, in maps.
    pub value: Option<Vec<u8>>,
    /// Whether it is the first key that no longer belongs to a range.
    pub ends_range: bool,
}

/// Elements that go into one message.
const ELEMENTS: usize = 250;

/// Adds elements; a key that is there already fails.
pub fn new_elements(table: &str, set: &str, elements: &[Element]) -> Vec<Message> {
    element_messages(NEW_ELEMENT, CREATE | EXCLUSIVE, table, set, elements)
}

/// Removes elements; a key that is not there fails.
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

/// Adds a rule to the end of a chain.
pub fn new_rule(table: &str, chain: &str, expressions: &[Expression<'_>]) -> Message {
    message(NEW_RULE, CREATE | APPEND, FAMILY_INET).with_text(1, table).with_text(2, chain).with_nest(4, |m| {
        expressions.iter().fold(m, |m, expression| {
            m.with_nest(ITEM, |m| m.with_text(1, expression.name()).with_nest(2, |m| expression.fill(m)))
        })
    })
}

/// What is asked about a packet without looking into it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Meta {
    /// The name of the link it came by: 16 bytes.
    InputName,
    /// The name of the link it goes by: 16 bytes.
    OutputName,
    /// Its family: one byte.
    Family,
    /// The protocol inside: one byte.
    Protocol,
}

/// Where a packet's bytes are counted from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Base {
    /// The head of the internet protocol.
    Network,
    /// The head of the protocol inside.
    Transport,
}

/// A step of a rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Expression<'a> {
    /// Loads a fact into a register.
    Meta(Meta, u32),
    /// Loads bytes of the packet: base, first, how many, register.
    Payload(Base, u32, u32, u32),
    /// Loads what kind of address the destination is here.
    DestinationType(u32),
    /// Loads the tracked connection's status bits.
    Status(u32),
    /// Loads the tracked connection's state bits.
    State(u32),
    /// Keeps these bits of a register.
    And(u32, u32),
    /// Goes on if the register has this value.
    Is(u32, &'a [u8]),
    /// Goes on if it has another.
    IsNot(u32, &'a [u8]),
    /// Goes on if the set has what the register holds.
    In(u32, &'a str),
    /// Goes on if it has not.
    NotIn(u32, &'a str),
    /// Replaces a key by its value in a map; ends the rule where there is none.
    Map(u32, &'a str),
    /// Changes the destination: family, register of the address, register of the port.
    Redirect(u8, u32, u32),
    /// Changes the source to the leaving link's address; ports at random where so.
    Masquerade {
        /// Whether ports are chosen at random.
        random: bool,
    },
    /// Lets it pass this chain.
    Accept,
    /// Drops it.
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
        /// Registers of four bytes begin at this number.
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
            // The type of the address, by its destination.
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
