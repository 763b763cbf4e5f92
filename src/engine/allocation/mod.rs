//! What a pod was promised: fit, in-place resize, and the checkpoint. Behaviour: spec 02a §8.
//!
//! ```text
//!  sync loop ─► Allocator (owner: admits, retries resizes) ─► Writer ─► allocated_pods_state
//!                  │ shares
//!  workers, status ─► Allocations (reads; marks progress of a resize)
//! ```
//!
//! The allocator alone writes allocations; workers only tell how far the actuation of a resize
//! is. The pod everything else sees is the specification with allocated resources in it.

mod allocations;
mod allocator;
mod checkpoint;
mod conditions;
pub mod fit;
pub mod resize;
#[cfg(test)]
mod tests;
mod writer;

pub use allocations::{Allocations, Progress};
pub use allocator::{Allocator, AllocatorDeps, Candidate, Preempt, Presence, Retried, Retry, Trigger};
pub use checkpoint::{Checkpoint, StateError};
pub use conditions::{PendingReason, ResizeCondition, ResizeConditions};
pub use writer::Writer;
