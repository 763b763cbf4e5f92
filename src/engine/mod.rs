//! Who drives pods: sync loop, pod manager, pod workers, admission, allocation, housekeeping.
//!
//! In: ordered operations of the mux, observations of the pod store. Out: calls through the
//! traits in [`ports`], statuses for the status manager. Behaviour: spec 02a.

pub mod admission;
pub mod allocation;
pub mod deadline;
pub mod grace;
pub mod ports;
