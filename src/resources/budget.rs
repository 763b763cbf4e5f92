//! How much of the node is for pods, and how much is kept back. Pure. Behaviour: spec 06a §8.1.

use super::values::Amounts;

/// Who something is kept back for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReservedFor {
    /// `systemReserved`
    System,
    /// `kubeReserved`
    Kube,
}

impl ReservedFor {
    /// As texts call it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::System => "System",
            Self::Kube => "Kube",
        }
    }
}

/// What is enforced on the group that a reservation names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Enforcement {
    /// Nothing.
    None,
    /// All of it.
    Full,
    /// Only what can be squeezed: the CPU weight.
    Compressible,
}

/// A part of the node that pods do not get.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reservation {
    /// For whom.
    pub for_whom: ReservedFor,
    /// How much.
    pub amounts: Amounts,
    /// `systemReservedCgroup` or `kubeReservedCgroup`; it must exist where something is enforced.
    pub cgroup: String,
    /// What is enforced.
    pub enforcement: Enforcement,
}

/// All reservations together.
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

/// What kubepods gets: the node less what is reserved, or all of it where pods are not held to it.
pub fn for_pods(capacity: &Amounts, reservations: &[Reservation], enforced: bool) -> Amounts {
    if enforced { capacity.less(&reserved(reservations)) } else { capacity.clone() }
}

/// What is wrong with the reservations; `None` where they fit.
pub fn complaint(capacity: &Amounts, reservations: &[Reservation]) -> Option<String> {
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
    use super::*;

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
    fn more_than_the_node_has_cannot_be_reserved() {
        assert_eq!(complaint(&capacity(), &[reservation(4000, 1000)]), None);
        assert_eq!(
            complaint(&capacity(), &[reservation(1, 600), reservation(1, 600)]).as_deref(),
            Some(
                "invalid Node Allocatable configuration. Resource \"memory\" has a reservation of 1200 but capacity \
                 of 1000. Expected capacity >= reservation."
            )
        );
    }
}
