//! Refuses pods while the node is under pressure, but for those that run already: to evict them is the evictor's to
//! decide. Pure. Behaviour: spec 02a §6.1, §14, 05 §3.8.

use super::{AdmitInput, Admitted, Purpose, Refusal, taints};
use berth_types::{api, qos::Qos};

pub(super) fn check(input: &AdmitInput<'_>, _: &mut Admitted) -> Result<(), Refusal> {
    let pressures = &input.node.pressures;
    if pressures.is_empty() || input.pod.is_critical() || matches!(input.purpose, Purpose::Restored) {
        return Ok(());
    }
    if pressures.iter().all(|p| p == "MemoryPressure") && (Qos::of(input.pod) != Qos::BestEffort || tolerates(input)) {
        return Ok(());
    }
    Err(Refusal::new("Evicted", format!("The node had condition: [{}]. ", pressures.join(" "))))
}

/// Whether the pod tolerates the taint of memory pressure.
fn tolerates(input: &AdmitInput<'_>) -> bool {
    let taint = api::Taint {
        key: "node.kubernetes.io/memory-pressure".to_owned(),
        effect: "NoSchedule".to_owned(),
        ..api::Taint::default()
    };
    taints::is_tolerated(&taint, input.pod.spec().tolerations.as_deref().unwrap_or_default())
}
