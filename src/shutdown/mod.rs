//! Graceful node shutdown: terminates pods by priority class, lowest first.
//!
//! ```text
//!  logind ── PrepareForShutdown ─────► keeper ──► drain ──► pods of one class after the other
//!  SIGTERM, if so configured ────────────────────►  ├──► node facts, state file, metrics
//!  administrator ─────────────────► door ───────────┘
//! ```
//!
//! `classes` (pure) groups pods and their grace periods; `drain` terminates them and waits until their
//! final statuses are at the API server; `keeper` owns the inhibitor lock that logind waits for; `door`
//! is the socket by which administrators and programs on the machine request a drain. Implements
//! spec 05 §7.

mod classes;
mod door;
mod drain;
mod keeper;
mod ports;
mod record;
#[cfg(test)]
mod testing;

pub use classes::{Class, Given, Plan};
pub use door::{Answer, Ask, Door};
pub use drain::{Cause, Drain, DrainDeps};
pub use keeper::{Keeper, Override};
pub use ports::{LoginManager, LoginSession, LoginSignals, Pods};
