//! Pod status: phase, conditions, and container statuses (all pure), and the status manager.
//!
//! Inputs: a pod, the observation of the runtime ([`berth_types::observation`]), and results of probes and starts
//! ([`StatusInput`]). Output: the `status` of the pod, built by [`build`], and its cache, [`StatusManager`], which owns
//! the state of this crate.
//!
//! ```text
//!  StatusInput ─► build ─► accept ─► StatusManager ─► server, `why`
//!                  │                     │
//!    containers ─► phase ─► readiness    └─► unsent ─► merge ─► patch ─► (API sender)
//!                   ─► conditions
//! ```
//!
//! The API sender is `kube::status_writer`; it uses [`StatusManager::all_cached`], [`mod@status_merge`],
//! and [`mod@patch`].
//! Implements spec 02b §1-9, §14.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves"))]

pub mod addresses;
mod builder;
pub mod conditions;
pub mod containers;
pub mod diff;
pub mod final_status;
#[cfg(test)]
mod fixture;
mod input;
pub mod latency;
pub mod lookup;
mod manager;
pub mod normalization;
pub mod patch;
pub mod phase;
pub mod previous_status;
mod readiness;
mod resources;
pub mod restart_all;
pub mod status_merge;

pub use builder::build;
pub use input::{BuildKind, Eviction, NodeFacts, PodCgroup, ProbeOutcome, StartFailure, StatusInput};
pub use manager::{CachedStatus, StatusEvent, StatusManager, UpdateOutcome};
pub use phase::Phase;
pub use restart_all::{in_progress as restart_all_in_progress, triggered as restart_all_triggered};
