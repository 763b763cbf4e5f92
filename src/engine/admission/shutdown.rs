//! Refuses every pod while the node shuts down. Pure. Behaviour: spec 02a §6.1, 05 §7.

use super::{AdmitInput, Admitted, Refusal};

pub(super) fn check(input: &AdmitInput<'_>, _: &mut Admitted) -> Result<(), Refusal> {
    if input.node.shutting_down {
        return Err(Refusal::new("NodeShutdown", "Pod was rejected as the node is shutting down."));
    }
    Ok(())
}
