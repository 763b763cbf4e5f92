//! What the API sees: phase, conditions, container statuses (all pure), and the status manager.

pub mod accept;
pub mod addresses;
mod build;
pub mod conditions;
pub mod containers;
pub mod diff;
mod input;
pub mod lookup;
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
pub use phase::Phase;
