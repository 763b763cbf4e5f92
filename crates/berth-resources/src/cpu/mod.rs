//! CPU manager: exclusive CPUs for containers of Guaranteed pods, and the shared pool for all others.
//!
//! ```text
//!  policy_options ─► StaticPolicy ◄─ reserved_cpus
//!  container ─► hints ─► topology manager ─► allocate ─► CpuState ─► checkpoint ─► cpu_manager_state
//!                                              └► packed or distributed allocator
//! ```
//!
//! Implements spec 06b §1. Everything here is pure; the caller reads and writes the checkpoint.

pub mod checkpoint;
pub mod distributed_allocator;
pub mod hints;
pub mod packed_allocator;
pub mod policy_options;
pub mod reserved_cpus;
pub mod state;
pub mod static_policy;

#[cfg(test)]
mod fixtures;

pub use checkpoint::{CpuCheckpointError, InitialContainers};
pub use packed_allocator::{AllocatorOptions, NotEnoughCpus};
pub use policy_options::{CpuPolicy, CpuPolicyContext, CpuPolicyError, StaticOptions};
pub use reserved_cpus::{CpuReservationError, ReservedCpus};
pub use state::{CpuReservation, CpuState, CpuStateMismatch};
pub use static_policy::{
    CpuAlignment, CpuAllocation, CpuAllocationError, PodCpuAllocation, ReusableCpus, StaticPolicy, exclusive_cpus,
    pod_exclusive_cpus,
};
