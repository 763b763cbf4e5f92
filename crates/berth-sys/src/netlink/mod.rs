//! Netlink client: links, addresses, routes, nf_tables, and conntrack.
//!
//! ```text
//!  builders (route, filter, connections) ─► Message ─► Socket ─► kernel
//!                                                 replies ─► Attributes ◄─┘
//! ```
//!
//! An own encoder and decoder instead of the packet crates: one tenth of the code serves four protocols, the setup of a
//! pod takes one system call, and the decoder accepts any input without panicking. A socket belongs to the network
//! namespace of the thread that opened it, wherever it is used later. Every call blocks, for at most [`LIMIT`].

pub mod conntrack;
pub mod counters;
pub mod message;
pub mod nf_tables;
pub mod rtnetlink;
pub mod socket;

pub use message::{Attributes, Message};
pub use socket::{BatchError, LIMIT, NetlinkFamily, Reply, Socket};
