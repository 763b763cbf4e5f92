//! Graceful node shutdown: terminates pods by priority class, lowest first.
//!
//! ```text
//!  logind ── PrepareForShutdown ─────► inhibitor lock ──► drain ──► pods of one class after the other
//!  SIGTERM, if so configured ────────────────────►  ├──► node facts, state file, metrics
//!  administrator ─────────────────► drain socket ───┘
//! ```
//!
//! `classes` (pure) groups pods and their grace periods; `drain` terminates them and waits until their
//! final statuses are at the API server; `inhibitor_lock` owns the inhibitor lock that logind waits for; `drain_socket`
//! is the socket by which administrators and programs on the machine request a drain. Implements
//! spec 05 §7.

mod classes;
mod drain;
mod drain_socket;
#[cfg(test)]
mod fixture;
mod inhibitor_lock;
mod ports;
mod state_file;

pub use classes::{PodTimeLimits, ShutdownClass, ShutdownPlan};
pub use drain::{Drain, DrainCause, DrainDeps};
pub use drain_socket::{DrainRequest, DrainResponse, DrainSocket};
pub use inhibitor_lock::{InhibitorLock, LogindOverride};
pub use ports::{LoginManager, LoginSession, LoginSignals, Pods};
