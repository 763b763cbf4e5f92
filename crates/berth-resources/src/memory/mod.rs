//! Memory manager: memory and huge pages of NUMA nodes for Guaranteed pods. Without IO.
//!
//! ```text
//!  topology manager ─ container_hints, pod_hints ─► StaticMemoryPolicy ◄─ new, restore ─ topology, reserved memory
//!  admission ──────── allocate ───────────────────►        │
//!  pod worker ─────── release_init_before, mems_of ►        └─► MemoryCheckpoint ─► memory_manager_state
//! ```
//!
//! Implements spec 06b §2.

mod checkpoint;
#[cfg(test)]
mod fixture;
mod hints;
mod machine_state;
mod placement;
mod reserved_memory;
mod static_policy;

pub use checkpoint::{MemoryCheckpoint, MemoryCheckpointError};
pub use machine_state::{MachineState, MemoryAssignments, MemoryBlock, MemoryTable, NodeMemory};
pub use placement::MemoryAllocationError;
pub use reserved_memory::{
    MemoryPolicy, MemoryPolicyError, NodeMemoryReservation, ReservedMemory, ReservedMemoryError,
};
pub use static_policy::{MemoryAllocation, MemoryStateError, PodMemoryAllocation, StaticMemoryPolicy};
