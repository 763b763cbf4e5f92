//! Memory QoS: its settings, and warnings of kernels that lack what it requires. Spec 06a §10.2.

use tracing::warn;

use super::{composition_root::BuildError, settings};
use crate::node::MachineInfo;
use berth_config::LoadedConfig;
use berth_sys::machine;
use berth_types::memory_qos::MemoryQos;

/// Oldest kernel without livelocks of throttled processes.
const MINIMUM_KERNEL: (u32, u32) = (5, 9);

/// Settings of the values of containers; `None` without the gate. Logs a warning if the kernel is too old.
///
/// # Errors
/// Reservations that are invalid or exceed the machine's capacity.
pub(super) fn of_containers(
    loaded: &LoadedConfig,
    machine: &MachineInfo,
    cgroup_v2: bool,
) -> Result<Option<MemoryQos>, BuildError> {
    let Some(policy) = settings::memory_reservation_policy(loaded) else { return Ok(None) };
    match warning(cgroup_v2, machine.kernel_version) {
        Some(text) => warn!(currentKernel = %machine.kernel_release, minimumKernel = "5.9", "{text}"),
        None if cgroup_v2 && machine.kernel_version.is_none() => {
            warn!("Failed to detect kernel version for MemoryQoS compatibility check");
        }
        None => {}
    }
    Ok(Some(MemoryQos {
        policy,
        throttling_factor: loaded.config.memory_throttling_factor.unwrap_or(0.9),
        allocatable_bytes: settings::absolute_allocatable_memory(loaded, machine)?,
        page_bytes: machine::page_bytes(),
    }))
}

fn warning(cgroup_v2: bool, kernel: Option<(u32, u32)>) -> Option<&'static str> {
    if !cgroup_v2 {
        return Some("Warning: MemoryQoS feature only works with cgroups v2 on Linux, but enabled with cgroups v1");
    }
    let is_old = kernel.is_some_and(|version| version < MINIMUM_KERNEL);
    is_old.then_some("Warning: MemoryQoS memory.high throttling may cause process livelock on older kernels")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_that_lack_what_it_requires_are_reported() {
        for (cgroup_v2, kernel, expected) in [
            (true, Some((5, 9)), None),
            (true, Some((6, 1)), None),
            (true, None, None),
            (true, Some((5, 8)), Some("livelock on older kernels")),
            (true, Some((4, 18)), Some("livelock on older kernels")),
            (false, Some((6, 1)), Some("enabled with cgroups v1")),
        ] {
            let got = warning(cgroup_v2, kernel);
            assert_eq!(got.is_some(), expected.is_some(), "{cgroup_v2} {kernel:?}");
            assert!(got.is_none_or(|text| text.ends_with(expected.unwrap_or_default())), "{got:?}");
        }
    }
}
