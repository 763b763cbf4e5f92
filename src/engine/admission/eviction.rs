//! Admission handler for node pressure: refuses pods while the node has a pressure condition.
//!
//! Exempt are critical pods, and pods that ran before a restart of the agent: the eviction manager
//! decides about those. Pure. Implements spec 02a §6.1, §14, 05 §3.8.

use super::{Admission, AdmissionRejection, AdmitInput, Purpose, taints};
use berth_types::{api, qos::Qos};

pub(super) fn check(input: &AdmitInput<'_>, _: &mut Admission) -> Result<(), AdmissionRejection> {
    let pressures = &input.node.pressures;
    if pressures.is_empty() || input.pod.is_critical() || matches!(input.purpose, Purpose::Restored) {
        return Ok(());
    }
    if pressures.iter().all(|p| p == "MemoryPressure") && (Qos::of(input.pod) != Qos::BestEffort || tolerates(input)) {
        return Ok(());
    }
    Err(AdmissionRejection::new("Evicted", format!("The node had condition: [{}]. ", pressures.join(" "))))
}

/// Whether the pod tolerates the taint `node.kubernetes.io/memory-pressure:NoSchedule`.
fn tolerates(input: &AdmitInput<'_>) -> bool {
    let taint = api::Taint {
        key: "node.kubernetes.io/memory-pressure".to_owned(),
        effect: "NoSchedule".to_owned(),
        ..api::Taint::default()
    };
    taints::is_tolerated(&taint, input.pod.spec().tolerations.as_deref().unwrap_or_default())
}
