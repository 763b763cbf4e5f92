//! Networks by plugins: programs that are told in JSON what a pod needs.
//!
//! ```text
//!  /etc/cni/net.d ─► config (first file) ─┐
//!  pod ─► arguments ──────────────────────┼─► invoke (a plugin after the other) ─► result ─► addresses
//!  /var/lib/cni/results ◄─► cache ────────┘
//! ```
//!
//! What was used to add a pod is kept beside its result, so that it is removed the same way whatever happened to the
//! configuration. Behaviour: spec 09b §13.

mod cache;
mod config;
mod invoke;
mod plugins;
mod result;

pub use plugins::{Plugins, Request};
