//! Who sees to volumes that are more than files: one task per volume and its name on the node.
//!
//! ```text
//!  manager ─► Board ─► Slot: what pods want ─► owner task ─► plugin (stage, publish, …)
//!                      Slot: what is there  ◄──┘
//! ```
//!
//! `state.rs` and `backoff.rs` decide (both pure); `task.rs` does one thing at a time and tells. It sleeps until
//! a pod, the node's status, a driver or the clock gives it something to do. Behaviour: spec 07 §3-6.

mod backoff;
mod board;
mod measure;
mod mount;
mod state;
mod task;
#[cfg(test)]
mod tests;

pub use board::{Board, BoardDeps, Desire, Leftover, Shown, Staged};
pub use state::Presence;
