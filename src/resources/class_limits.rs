//! Values of the QoS cgroups, from the requests of all pods: weight, memory QoS, and `qosReserved`. Pure.
//! Implements spec 06a §8.3.

use std::collections::BTreeMap;

use super::values::CgroupLimits;
use berth_types::{
    Pod, cpu,
    memory_qos::MemoryReservationPolicy,
    qos::Qos,
    resources::{self, CPU, MEMORY, Overhead},
};

/// An unlimited huge page limit.
const UNBOUNDED: u64 = 1 << 62;

/// Requests of a pod that count for the QoS cgroups, with its overhead.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PodRequests {
    /// QoS class of the pod.
    pub class: Qos,
    /// CPU request in milli-CPU.
    pub cpu_milli: i64,
    /// Memory request in bytes.
    pub memory_bytes: u64,
}

impl PodRequests {
    /// Requests of a pod.
    pub(super) fn of(pod: &Pod) -> Self {
        let requests = resources::pod_requests(pod.spec(), Overhead::Included);
        Self {
            class: Qos::of(pod),
            cpu_milli: requests.get(CPU).map_or(0, |amount| amount.milli()).max(0),
            memory_bytes: requests.get(MEMORY).map_or(0, |amount| amount.value()).max(0).unsigned_abs(),
        }
    }
}

/// Sums of the requests of all pods.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct ClassRequests {
    /// CPU requests of Burstable pods in milli-CPU.
    pub burstable_cpu_milli: i64,
    /// Memory requests of Burstable pods in bytes.
    pub burstable_memory: u64,
    /// Memory requests of Guaranteed pods in bytes.
    pub guaranteed_memory: u64,
}

impl ClassRequests {
    /// Sums the requests of pods.
    pub(super) fn sum<'a>(pods: impl IntoIterator<Item = &'a PodRequests>) -> Self {
        let mut sum = Self::default();
        for pod in pods {
            match pod.class {
                Qos::Guaranteed => sum.guaranteed_memory = sum.guaranteed_memory.saturating_add(pod.memory_bytes),
                Qos::Burstable => {
                    sum.burstable_cpu_milli = sum.burstable_cpu_milli.saturating_add(pod.cpu_milli);
                    sum.burstable_memory = sum.burstable_memory.saturating_add(pod.memory_bytes);
                }
                Qos::BestEffort => {}
            }
        }
        sum
    }
}

/// Settings that the values of the QoS cgroups depend on.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ClassRules {
    /// Huge page sizes of the node, in bytes.
    pub hugepage_sizes: Vec<u64>,
    /// `memoryReservationPolicy`; `None` without the gate `MemoryQoS`.
    pub memory_qos: Option<MemoryReservationPolicy>,
    /// `qosReserved`; `None` without the gate `QOSReserved`.
    pub reserved: Option<ReservedRequests>,
}

/// `qosReserved`: how much of the memory requests of a class the classes below it cannot use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReservedRequests {
    /// Percentage of the memory requests, 0 to 100.
    pub memory_percent: u8,
    /// Memory that the reservations of the node leave, in bytes.
    pub allocatable_bytes: u64,
}

/// Values of the cgroups of Guaranteed (kubepods), Burstable, and BestEffort pods.
pub(super) type ClassLimits = BTreeMap<Qos, CgroupLimits>;

/// Returns the values of all classes. A memory limit of 0 means that the reserved requests leave no memory.
pub(super) fn of_classes(requests: &ClassRequests, rules: &ClassRules) -> ClassLimits {
    let weighted = |shares| CgroupLimits {
        cpu_shares: Some(shares),
        hugepages: rules.hugepage_sizes.iter().map(|&size| (size, UNBOUNDED)).collect(),
        ..CgroupLimits::default()
    };
    let mut kubepods = CgroupLimits::default();
    let mut burstable = weighted(cpu::shares(requests.burstable_cpu_milli));
    let mut best_effort = weighted(cpu::MIN_SHARES);
    if let Some(policy) = rules.memory_qos {
        let (min, low) = match policy {
            MemoryReservationPolicy::None => (0, 0),
            MemoryReservationPolicy::TieredReservation => {
                (requests.guaranteed_memory.saturating_add(requests.burstable_memory), requests.burstable_memory)
            }
        };
        (kubepods.memory_min, burstable.memory_low) = (Some(min), Some(low));
    }
    if let Some(reserved) = rules.reserved.filter(|reserved| reserved.allocatable_bytes > 0) {
        let share = |bytes: u64| i128::from(bytes) * i128::from(reserved.memory_percent) / 100;
        let left = i128::from(reserved.allocatable_bytes) - share(requests.guaranteed_memory);
        let limit = |bytes: i128| Some(i64::try_from(bytes.max(0)).unwrap_or(i64::MAX));
        burstable.memory = limit(left);
        best_effort.memory = limit(left - share(requests.burstable_memory));
    }
    [(Qos::Guaranteed, kubepods), (Qos::Burstable, burstable), (Qos::BestEffort, best_effort)].into()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn sums(burstable: u64, guaranteed: u64) -> ClassRequests {
        ClassRequests { burstable_cpu_milli: 0, burstable_memory: burstable, guaranteed_memory: guaranteed }
    }

    #[test]
    fn requests_of_pods_include_overhead_and_are_summed_by_class() {
        let pod = |spec| {
            let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec});
            let pod = Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete");
            PodRequests::of(&pod)
        };
        let requests = |requests| json!([{"name": "c", "resources": {"requests": requests}}]);
        let limits = json!({"cpu": "1", "memory": "128Mi"});
        let equal = json!([{"name": "c", "resources": {"requests": limits, "limits": limits}}]);
        let small = requests(json!({"cpu": "100m", "memory": "120Mi"}));
        let pods = [
            pod(json!({"containers": equal})),
            pod(json!({"containers": small, "overhead": {"memory": "8Mi"}})),
            pod(json!({"containers": requests(json!({"memory": "256Mi"}))})),
            pod(json!({"containers": [{"name": "c"}], "overhead": {"memory": "1Gi"}})),
        ];
        let sum = ClassRequests::sum(&pods);
        assert_eq!(sum, ClassRequests { burstable_cpu_milli: 100, ..sums(384 * MIB, 128 * MIB) });
    }

    #[test]
    fn requests_are_protected_by_the_policy() {
        // AC-06a-27, AC-06a-28
        let tiered = Some(MemoryReservationPolicy::TieredReservation);
        for (policy, requests, min, low) in [
            (tiered, sums(402_653_184, 134_217_728), Some(536_870_912), Some(402_653_184)),
            (tiered, sums(0, 0), Some(0), Some(0)),
            (Some(MemoryReservationPolicy::None), sums(MIB, MIB), Some(0), Some(0)),
            (None, sums(MIB, MIB), None, None),
        ] {
            let rules = ClassRules { memory_qos: policy, ..ClassRules::default() };
            let limits = of_classes(&requests, &rules);
            let of = |class| (limits[&class].memory_min, limits[&class].memory_low, limits[&class].memory);
            assert_eq!(of(Qos::Guaranteed), (min, None, None), "{policy:?}");
            assert_eq!(of(Qos::Burstable), (None, low, None), "{policy:?}");
            assert_eq!(of(Qos::BestEffort), (None, None, None), "{policy:?}");
        }
    }

    #[test]
    fn lower_classes_cannot_use_what_is_reserved() {
        // AC-06a-29
        let requests = sums(402_653_184, 134_217_728);
        for (percent, allocatable, burstable, best_effort) in [
            (50, 8_589_934_592, Some(8_522_825_728), Some(8_321_499_136)),
            (100, 8_589_934_592, Some(8_455_716_864), Some(8_053_063_680)),
            (33, 8_589_934_592, Some(8_545_642_742), Some(8_412_767_192)),
            (0, 8_589_934_592, Some(8_589_934_592), Some(8_589_934_592)),
            (100, 268_435_456, Some(134_217_728), Some(0)),
            (100, 0, None, None),
        ] {
            let reserved = ReservedRequests { memory_percent: percent, allocatable_bytes: allocatable };
            let rules = ClassRules { reserved: Some(reserved), ..ClassRules::default() };
            let limits = of_classes(&requests, &rules);
            let of = |class: Qos| limits[&class].memory;
            assert_eq!((of(Qos::Burstable), of(Qos::BestEffort)), (burstable, best_effort), "{percent}");
            assert_eq!(of(Qos::Guaranteed), None, "{percent}");
        }
    }

    #[test]
    fn huge_pages_are_unbounded_and_weights_follow_requests() {
        let rules = ClassRules { hugepage_sizes: vec![2 * MIB], ..ClassRules::default() };
        let requests = ClassRequests { burstable_cpu_milli: 350, ..ClassRequests::default() };
        let limits = of_classes(&requests, &rules);
        // AC-06a-11
        let of = |class: Qos| (limits[&class].cpu_shares, limits[&class].hugepages.get(&(2 * MIB)).copied());
        assert_eq!(of(Qos::Burstable), (Some(358), Some(UNBOUNDED)));
        assert_eq!(of(Qos::BestEffort), (Some(2), Some(UNBOUNDED)));
        assert_eq!(of(Qos::Guaranteed), (None, None));
    }
}
