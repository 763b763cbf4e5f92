//! Ends the pods of a node that goes down, least important first.
//!
//! ```text
//!  logind ── the machine goes down ──► keeper ──► drain ──► pods of one class after the other
//!  SIGTERM, where that is asked for ─────────────►  ├──► facts of the node, state file, metrics
//!  somebody on this machine ──────► door ───────────┘
//! ```
//!
//! `classes` (pure) says which pods go together and how long they get; `drain` lets them go and waits until their last
//! words are with the API server; `keeper` holds the lock for which logind waits; `door` is a socket by which people and
//! programs of the machine ask for it. Behaviour: spec 05 §7.

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
