//! Refuses every pod that is new while the node shuts down; one that runs is let in, to be ended in its turn. Pure. Behaviour: spec 02a §6.1, 05 §7.

use super::{AdmitInput, Admitted, Purpose, Refusal};

pub(super) fn check(input: &AdmitInput<'_>, _: &mut Admitted) -> Result<(), Refusal> {
    if input.node.shutting_down && !matches!(input.purpose, Purpose::Restored) {
        return Err(Refusal::new("NodeShutdown", "Pod was rejected as the node is shutting down."));
    }
    Ok(())
}
