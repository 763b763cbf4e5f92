//! What the API sees: phase, conditions, container statuses (all pure), and the status manager.

pub mod addresses;
mod build;
pub mod conditions;
pub mod containers;
mod input;
pub mod lookup;
pub mod phase;
mod readiness;
mod resources;
pub mod restart_all;
#[cfg(test)]
mod testing;

pub use build::build;
pub use input::{Build, Eviction, NodeFacts, PodCgroup, ProbeOutcome, StartFailure, StatusInput};
pub use phase::Phase;
