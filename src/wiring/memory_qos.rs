//! Memory QoS: settings of containers, and warnings about kernels without support. Spec 06a §10.2.

use tracing::warn;

use super::{composition_root::BuildError, settings};
use crate::node::MachineInfo;
use berth_config::LoadedConfig;
use berth_sys::machine;
use berth_types::memory_qos::MemoryQos;

/// Oldest kernel without livelocks of throttled processes.
const MINIMUM_KERNEL: (u32, u32) = (5, 9);
/// Warning on cgroup v1.
const CGROUP_V1: &str = "Warning: MemoryQoS feature only works with cgroups v2 on Linux, but enabled with cgroups v1";
/// Warning on kernels older than [`MINIMUM_KERNEL`].
const OLD_KERNEL: &str = "Warning: MemoryQoS memory.high throttling may cause process livelock on older kernels";
/// Warning on kernels whose release has no version.
const UNKNOWN_KERNEL: &str = "Failed to detect kernel version for MemoryQoS compatibility check";

/// Settings of the values of containers; `None` without the gate. Logs a warning on cgroup v1, and on old and unknown
/// kernels.
///
/// # Errors
/// Reservations that are invalid or exceed the machine's capacity.
pub(super) fn of_containers(
    loaded: &LoadedConfig,
    machine: &MachineInfo,
    cgroup_v2: bool,
) -> Result<Option<MemoryQos>, BuildError> {
    let Some(policy) = settings::memory_reservation_policy(loaded) else { return Ok(None) };
    if let Some(text) = warning(cgroup_v2, machine.kernel_version) {
        warn!(currentKernel = %machine.kernel_release, minimumKernel = "5.9", "{text}");
    }
    Ok(Some(MemoryQos {
        policy,
        throttling_factor: loaded.config.memory_throttling_factor.unwrap_or(0.9),
        allocatable_bytes: settings::absolute_allocatable_memory(loaded, machine)?,
        page_bytes: machine::page_bytes(),
    }))
}

/// Returns why memory QoS may not work. `kernel` is the major and minor version; `None` if it is unknown.
fn warning(cgroup_v2: bool, kernel: Option<(u32, u32)>) -> Option<&'static str> {
    match kernel {
        _ if !cgroup_v2 => Some(CGROUP_V1),
        None => Some(UNKNOWN_KERNEL),
        Some(version) if version < MINIMUM_KERNEL => Some(OLD_KERNEL),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_without_support_are_reported() {
        for (cgroup_v2, kernel, expected) in [
            (true, Some((5, 9)), None),
            (true, Some((6, 1)), None),
            (true, None, Some(UNKNOWN_KERNEL)),
            (true, Some((5, 8)), Some(OLD_KERNEL)),
            (true, Some((4, 18)), Some(OLD_KERNEL)),
            (false, Some((6, 1)), Some(CGROUP_V1)),
            (false, None, Some(CGROUP_V1)),
        ] {
            assert_eq!(warning(cgroup_v2, kernel), expected, "{cgroup_v2} {kernel:?}");
        }
    }
}
