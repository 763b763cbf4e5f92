//! Talking to the kernel about links, addresses, routes, packet filters and tracked connections.
//!
//! ```text
//!  builders (route, filter, connections) ─► Message ─► Socket ─► kernel
//!                                                 replies ─► Attributes ◄─┘
//! ```
//!
//! Our own writer and reader instead of the packet crates: one tenth of the code serves four protocols, what a pod needs
//! travels in one system call, and the reader takes anything without panicking. A socket belongs to the network namespace
//! of the thread that opened it, wherever it is used later. Everything blocks, for [`LIMIT`] at most.

pub mod connections;
pub mod counters;
pub mod filter;
pub mod message;
pub mod route;
pub mod socket;

pub use message::{Attributes, Message};
pub use socket::{Failure, LIMIT, Protocol, Reply, Socket};
