//! Admission handler for in-place resize: refuses infeasible resizes. Pure. Implements spec 02a §8.3.

use super::{Admission, AdmissionRejection, AdmitInput, Purpose};
use crate::engine::allocation::resize::infeasible;

pub(super) fn check(input: &AdmitInput<'_>, _: &mut Admission) -> Result<(), AdmissionRejection> {
    let Purpose::Resize { allocated } = input.purpose else { return Ok(()) };
    match infeasible(input.pod, allocated, &input.rules.resize) {
        None => Ok(()),
        Some(why) => {
            let mut refusal = AdmissionRejection::new("Infeasible", why.message());
            refusal.detail = Some(why.detail());
            Err(refusal)
        }
    }
}
