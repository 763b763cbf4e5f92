//! Volume owners: one reconciler task per volume and node for volumes that need a plugin call.
//!
//! ```text
//!  manager ─► Board ─► Slot: desires of pods ──► owner task ─► plugin (stage, publish, …)
//!                      Slot: observed state ◄──┘
//! ```
//!
//! `state.rs` and `backoff.rs` decide (both pure); `task.rs` runs one operation at a time and publishes the results.
//! The task sleeps until a pod, the node status, a driver, or a timer requires an operation. Implements spec 07 §3-6.

mod backoff;
mod registry;
mod state;
mod task;
#[cfg(test)]
mod tests;
mod usage_stats;
mod volume_operations;

pub use registry::{
    DesiredVolume, ObservedVolume, ReconcilerDeps, ReconcilerRegistry, ReconstructedPodVolume, ReconstructedStage,
};
pub use state::MountPresence;
