//! Pod resource allocation: fit, in-place resize, and checkpoint. Implements spec 02a §8.
//!
//! ```text
//!  sync loop ─► Allocator (owner: admits, retries resizes) ─► Writer ─► allocated_pods_state
//!                  │ shares
//!  workers, status ─► Allocations (reads; marks progress of a resize)
//! ```
//!
//! Only the allocator writes allocations; workers report the actuation progress of a resize. All other
//! components see the pod specification with the allocated resources in it.

mod allocations;
mod allocator;
mod checkpoint;
mod conditions;
pub mod resize;
pub mod resource_fit;
#[cfg(test)]
mod tests;
mod writer;

pub use allocations::{ActuationProgress, Allocations};
pub use allocator::{Allocator, AllocatorDeps, Candidate, Preempt, Retry, RetryResult, RuntimePresence, Trigger};
pub use checkpoint::{Checkpoint, StateError};
pub use conditions::{PendingReason, ResizeCondition, ResizeConditions};
pub use writer::Writer;
