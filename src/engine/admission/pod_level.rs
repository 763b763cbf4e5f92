//! Admission handler for pod-level resources: refuses them while their feature gate is off.
//!
//! Pure. Implements spec 02a §6.1.

use super::{Admission, AdmissionRejection, AdmitInput};
use berth_types::resources::is_pod_level;

pub(super) fn check(input: &AdmitInput<'_>, _: &mut Admission) -> Result<(), AdmissionRejection> {
    let level = input.pod.spec().resources.as_ref();
    let lists = level.into_iter().flat_map(|r| [&r.requests, &r.limits]).flatten();
    let is_used = lists.flat_map(|list| list.keys()).any(|name| is_pod_level(name));
    if is_used && !input.rules.pod_level_resources {
        return Err(AdmissionRejection::new(
            "PodLevelResourcesNotSupported",
            "PodLevelResources feature gate is disabled",
        ));
    }
    Ok(())
}
