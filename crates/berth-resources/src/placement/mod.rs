//! CPU, memory, and topology managers of the node, behind one mutex, with their checkpoints.
//!
//! ```text
//!  sync loop ─ admit ─► device manager ─ per container ─► PlacementManager ─► cpu_manager_state, memory_manager_state
//!  pod worker ◄─ CPUs and memory nodes of a container ──┘        │
//!  running containers of the shared pool ◄─ cpuset reconciler ◄──┘
//! ```
//!
//! Implements spec 06b §1.11, §2.7, §3.2.

mod containers;
mod cpuset_reconciler;
mod manager;
mod placement_state;
pub mod settings;
mod state_renewal;

pub use cpuset_reconciler::{CpusetReconcilerDeps, CpusetUpdater, PodContainers, RunningContainer, reconcile_cpusets};
pub use manager::{PlacementManager, PlacementManagerDeps};
pub use placement_state::{PlacementRefusal, PlacementSnapshot};
pub use settings::{PlacementPolicies, PlacementSettings, PlacementSettingsError};
pub use state_renewal::renew_state_files;

#[cfg(test)]
mod tests;
