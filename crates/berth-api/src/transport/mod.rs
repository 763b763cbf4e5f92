//! HTTP transport to the API server: connection pools, credentials, rate limits, and retries.
//!
//! ```text
//!                    ┌─ beat:  lease, node status ──── 1 connection
//!  call ─► pace ─► pool ─ unary: the rest ──────────── 1-4
//!  watch ───────►    └─ watch: watches ─────────────── as many as the server's limit requires
//!                        ▲                                 ▲
//!     one dialer per pool, back-off while unreachable      identity, authorities: reloaded
//! ```
//!
//! A server limits the concurrent requests of a connection; a heartbeat must never wait for a watch to end, nor for a
//! dead connection. When the client certificate or the authorities change, new connections use them at once, and the
//! old ones are drained. The task of a pool owns its connections; requests occupy slots. Pools share what they learn
//! about the server: a dead connection triggers pings in all pools (`hurry.rs`), a successful connection makes all
//! pools dial.
//!
//! Implements spec 10 §2, §8; 01 §10.

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
