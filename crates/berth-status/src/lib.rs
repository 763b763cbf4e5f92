//! What the API sees: phase, conditions, container statuses (all pure), and the status manager.
//!
//! In: a pod, what the runtime showed ([`berth_types::observed`]), what probes and starts said
//! ([`StatusInput`]). Out: `status` of the pod, built by [`build`], and the one cache of them,
//! [`StatusManager`], which owns the state of this room.
//!
//! ```text
//!  StatusInput ─► build ─► accept ─► StatusManager ─► server, `why`
//!                  │                     │
//!    containers ─► phase ─► readiness    └─► unsent ─► merge ─► patch ─► (API sender)
//!                   ─► conditions
//! ```
//!
//! The API sender is `kube::status_writer`; it works from [`StatusManager::kept`], [`mod@merge`] and
//! [`mod@patch`]. Behaviour: spec 02b §1-9, §14.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves"))]

pub mod accept;
pub mod addresses;
pub mod baseline;
mod build;
pub mod conditions;
pub mod containers;
pub mod diff;
mod input;
pub mod latency;
pub mod lookup;
mod manager;
pub mod merge;
pub mod patch;
pub mod phase;
mod readiness;
mod resources;
pub mod restart_all;
pub mod terminate;
#[cfg(test)]
mod testing;

pub use build::build;
pub use input::{Build, Eviction, NodeFacts, PodCgroup, ProbeOutcome, StartFailure, StatusInput};
pub use manager::{Kept, Outcome, StatusEvent, StatusManager};
pub use phase::Phase;
pub use restart_all::{in_progress as restart_all_in_progress, triggered as restart_all_triggered};
