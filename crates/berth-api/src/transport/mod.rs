//! The way to the API server: connections, who we are on them, and how often we ask.
//!
//! ```text
//!                    ┌─ beat:  lease, node status ──── 1 connection
//!  call ─► pace ─► pool ─ unary: the rest ──────────── 1-4
//!  watch ───────►    └─ watch: watches ─────────────── as many as the server's limit asks for
//!                        ▲                                 ▲
//!     one dialler per pool, gate while nobody answers      identity, authorities: followed
//! ```
//!
//! A server takes so many requests at once on a connection; a heartbeat must never wait for a watch
//! to end, nor for a connection that is dead. When the certificate or the authorities change, new
//! connections are made with the new ones at once, and what is under way on the old ones ends in
//! peace. A pool's task owns its connections, others have slots. What one pool learns of the server all
//! act on: a dead connection has all pinged (`hurry.rs`), a good one has all dial.
//! Behaviour: spec 10 §2, §8; 01 §10.

mod addresses;
mod answer;
mod body;
mod client;
mod config;
mod connection;
mod counting;
mod credentials;
mod dial;
mod exec;
mod follow;
mod gate;
mod hurry;
mod identity;
mod kubeconfig;
mod lines;
mod open;
mod pace;
mod plan;
mod pool;
mod proxy;
mod request;
mod retry;
#[cfg(test)]
mod tests;
mod trust;
mod tunnel;
mod warnings;
mod watching;

pub use client::Transport;
pub use config::{Http, TransportConfig, TransportDeps};
pub use dial::Pings;
pub use identity::{CertifiedPair, Identity, IdentityError};
pub use kubeconfig::{Acting, Cluster, ConnectError, Exec, ExecVariable, Kubeconfig, Source, User};
pub use pace::{Rate, Rates, Sharing};
pub use request::user_agent;
