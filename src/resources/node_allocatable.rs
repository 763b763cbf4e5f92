//! System and kube reservations, and what they leave for the kubepods cgroup. Pure. Implements spec 06a §8.1.

use super::values::{self, Amounts, CgroupLimits, PodRules};

/// Kind of a reservation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReservedFor {
    /// `systemReserved`
    System,
    /// `kubeReserved`
    Kube,
}

impl ReservedFor {
    /// Name in texts.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::System => "System",
            Self::Kube => "Kube",
        }
    }
}

/// Enforcement of a reservation on its own cgroup.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Enforcement {
    /// Not enforced.
    None,
    /// All resources are enforced.
    Full,
    /// Only compressible resources are enforced: the CPU weight.
    Compressible,
}

/// Resources of the node that are not available to pods.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reservation {
    /// Kind of the reservation.
    pub for_whom: ReservedFor,
    /// Reserved amounts.
    pub amounts: Amounts,
    /// `systemReservedCgroup` or `kubeReservedCgroup`; it must exist if the reservation is enforced.
    pub cgroup: String,
    /// Enforcement on that cgroup.
    pub enforcement: Enforcement,
}

/// Sum of all reservations.
pub fn reserved(all: &[Reservation]) -> Amounts {
    let mut sum = Amounts::default();
    let add = |to: &mut Option<i64>, more: Option<i64>| {
        if let Some(more) = more {
            *to = Some(to.unwrap_or(0).saturating_add(more));
        }
    };
    for amounts in all.iter().map(|r| &r.amounts) {
        add(&mut sum.cpu_milli, amounts.cpu_milli);
        add(&mut sum.memory_bytes, amounts.memory_bytes);
        add(&mut sum.pids, amounts.pids);
        for (size, bytes) in &amounts.hugepages {
            let total = sum.hugepages.entry(*size).or_default();
            *total = total.saturating_add(*bytes);
        }
    }
    sum
}

/// Amounts for kubepods: the capacity less reservations, or all of it if `pods` is not enforced.
pub fn for_pods(capacity: &Amounts, reservations: &[Reservation], enforced: bool) -> Amounts {
    if enforced { capacity.less(&reserved(reservations)) } else { capacity.clone() }
}

/// Values of the cgroup of a reservation. With the gate `MemoryQoS` its memory is protected as well (spec 06a §10.2).
pub(super) fn reserved_limits(reservation: &Reservation, rules: &PodRules) -> CgroupLimits {
    let limits = values::of_amounts(&reservation.amounts, &rules.hugepage_sizes);
    match reservation.enforcement {
        Enforcement::None => CgroupLimits::default(),
        Enforcement::Compressible => CgroupLimits { cpu_shares: limits.cpu_shares, ..CgroupLimits::default() },
        Enforcement::Full => {
            let protected = limits.memory.filter(|_| rules.memory_qos.is_some());
            CgroupLimits { memory_min: protected.map(|bytes| bytes.max(0).unsigned_abs()), ..limits }
        }
    }
}

/// Why the reservations exceed the capacity; `None` if they fit.
pub fn validate(capacity: &Amounts, reservations: &[Reservation]) -> Option<String> {
    let reserved = reserved(reservations);
    let pairs = [
        ("cpu", reserved.cpu_milli, capacity.cpu_milli),
        ("memory", reserved.memory_bytes, capacity.memory_bytes),
        ("pid", reserved.pids, capacity.pids),
    ];
    let over = pairs.into_iter().filter_map(|(name, reserved, capacity)| {
        let (reserved, capacity) = (reserved?, capacity?);
        let unit = if name == "cpu" { "m" } else { "" };
        (reserved > capacity).then(|| {
            format!(
                "Resource {name:?} has a reservation of {reserved}{unit} but capacity of {capacity}{unit}. Expected \
                 capacity >= reservation."
            )
        })
    });
    let over: Vec<String> = over.collect();
    (!over.is_empty()).then(|| format!("invalid Node Allocatable configuration. {}", over.join(" ")))
}

#[cfg(test)]
mod tests {
    use berth_types::memory_qos::MemoryReservationPolicy;

    use super::*;
    use crate::resources::CgroupDriver;

    fn reservation(cpu_milli: i64, memory_bytes: i64) -> Reservation {
        Reservation {
            for_whom: ReservedFor::System,
            amounts: Amounts { cpu_milli: Some(cpu_milli), memory_bytes: Some(memory_bytes), ..Amounts::default() },
            cgroup: String::new(),
            enforcement: Enforcement::None,
        }
    }

    fn capacity() -> Amounts {
        Amounts { cpu_milli: Some(4000), memory_bytes: Some(1000), pids: Some(100), ..Amounts::default() }
    }

    #[test]
    fn pods_get_what_is_not_reserved() {
        let two = [reservation(1000, 100), reservation(500, 50)];
        let got = for_pods(&capacity(), &two, true);
        assert_eq!((got.cpu_milli, got.memory_bytes, got.pids), (Some(2500), Some(850), Some(100)));
        assert_eq!(for_pods(&capacity(), &two, false), capacity());
        assert_eq!(for_pods(&capacity(), &[reservation(9000, 1)], true).cpu_milli, Some(0));
    }

    #[test]
    fn memory_of_a_reservation_is_limited_and_protected() {
        let rules = |memory_qos| PodRules {
            cpu_cfs_quota: true,
            cpu_period_us: 100_000,
            pids_limit: -1,
            hugepage_sizes: vec![],
            driver: CgroupDriver::Cgroupfs,
            memory_qos,
        };
        let gate = Some(MemoryReservationPolicy::None);
        for (enforcement, memory_qos, limit, min) in [
            (Enforcement::Full, None, Some(100), None),
            (Enforcement::Full, gate, Some(100), Some(100)),
            (Enforcement::Compressible, gate, None, None),
            (Enforcement::None, gate, None, None),
        ] {
            let limits = reserved_limits(&Reservation { enforcement, ..reservation(1000, 100) }, &rules(memory_qos));
            assert_eq!((limits.memory, limits.memory_min), (limit, min), "{enforcement:?}");
            assert_eq!(limits.cpu_shares, (enforcement != Enforcement::None).then_some(1024), "{enforcement:?}");
        }
        let without = Reservation { enforcement: Enforcement::Full, ..reservation(1000, 0) };
        assert_eq!(reserved_limits(&without, &rules(gate)).memory_min, None);
    }

    #[test]
    fn more_than_the_node_has_cannot_be_reserved() {
        assert_eq!(validate(&capacity(), &[reservation(4000, 1000)]), None);
        assert_eq!(
            validate(&capacity(), &[reservation(1, 600), reservation(1, 600)]).as_deref(),
            Some(
                "invalid Node Allocatable configuration. Resource \"memory\" has a reservation of 1200 but capacity \
                 of 1000. Expected capacity >= reservation."
            )
        );
    }
}
