//! CNI plugin networks: configuration, plugin invocation, and result cache.
//!
//! ```text
//!  /etc/cni/net.d ─► config (first file) ─┐
//!  pod ─► arguments ──────────────────────┼─► invoke (plugins in order) ─► result ─► addresses
//!  /var/lib/cni/results ◄─► cache ────────┘
//! ```
//!
//! The cache keeps the configuration and arguments of each ADD beside its result, so that DEL uses the same ones even
//! if the configuration changes. Implements spec 09b §13.

mod cache;
mod config;
mod plugin_runner;
mod plugins;
mod result;

pub use plugins::{CniRequest, Plugins};
