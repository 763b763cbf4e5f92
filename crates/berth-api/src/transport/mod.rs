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
//! about the server: a dead connection triggers pings in all pools (`keep_alive_pinger.rs`), a successful connection makes all
//! pools dial.
//!
//! Implements spec 10 §2, §8; 01 §10.

mod addresses;
mod body;
mod client;
mod config;
mod connection;
mod connection_choice;
mod constructor;
mod credentials;
mod dial_backoff;
mod dialer;
mod error_response;
mod exec_plugin;
mod identity;
mod keep_alive_pinger;
mod kubeconfig;
mod line_splitter;
mod pool;
mod proxy;
mod rate_limiter;
mod request;
mod request_metrics;
mod retry_policy;
#[cfg(test)]
mod tests;
mod tls_file_reloader;
mod trust;
mod tunnel;
mod warning_dedup;
mod watch_stream;

pub use client::Transport;
pub use config::{Http, TransportConfig, TransportDeps};
pub use dialer::Pings;
pub use identity::{CertifiedPair, ClientIdentity, IdentityError};
pub use kubeconfig::{Cluster, ConnectError, Exec, ExecVariable, Impersonation, InlineOrFile, Kubeconfig, User};
pub use rate_limiter::{Rate, RateLimitScope, Rates};
pub use request::user_agent;
