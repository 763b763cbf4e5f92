//! Admission handler for graceful node shutdown: refuses pods while the node shuts down.
//!
//! A pod that ran before a restart of the agent is admitted, so that it is terminated in shutdown
//! order. Pure. Implements spec 02a §6.1, 05 §7.

use super::{Admission, AdmissionRejection, AdmitInput, Purpose};

pub(super) fn check(input: &AdmitInput<'_>, _: &mut Admission) -> Result<(), AdmissionRejection> {
    if input.node.shutting_down && !matches!(input.purpose, Purpose::Restored) {
        return Err(AdmissionRejection::new("NodeShutdown", "Pod was rejected as the node is shutting down."));
    }
    Ok(())
}
