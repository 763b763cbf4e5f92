//! Who may ask us: the listeners and the routes behind them.
//!
//! The server holds no state; it reads snapshots through its own [`ports`] and never talks to a
//! worker. Today: the read-only port and the healthz port, both plain HTTP without
//! authentication, both showing only what spec 04 calls the open set. Behaviour: spec 04 §3, §5.1,
//! §5.2, spec 01 §7.1.

pub mod auth;
mod listeners;
pub mod ports;
mod routes;

pub use listeners::{Listening, bind, serve, serve_persistently};
pub use routes::{healthz_router, read_only_router};
