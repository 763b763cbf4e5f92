//! Admission handler for in-place resize: refuses infeasible resizes. Pure. Implements spec 02a §8.3.

use super::{AdmitInput, Admitted, Purpose, Refusal};
use crate::engine::allocation::resize::infeasible;

pub(super) fn check(input: &AdmitInput<'_>, _: &mut Admitted) -> Result<(), Refusal> {
    let Purpose::Resize { allocated } = input.purpose else { return Ok(()) };
    match infeasible(input.pod, allocated, &input.rules.resize) {
        None => Ok(()),
        Some(why) => {
            let mut refusal = Refusal::new("Infeasible", why.message());
            refusal.detail = Some(why.detail());
            Err(refusal)
        }
    }
}
