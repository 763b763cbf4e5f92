//! CPUs reserved for the system, which the static policy never assigns. Pure. Spec 06b §1.3.

use berth_types::{CpuSet, quantity::Amount};

use super::policy_options::StaticOptions;
use crate::topology::CpuTopology;

/// CPUs that are not available for exclusive assignment.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ReservedCpus {
    /// The reserved CPUs.
    pub cpus: CpuSet,
    /// All CPUs of cores that have a reserved CPU: unavailable with `full-pcpus-only`.
    pub whole_cores: CpuSet,
}

/// The static policy cannot start; the texts are the reference's.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CpuReservationError {
    /// Without a reservation all CPUs could be assigned, and the shared pool would be empty.
    #[error("[cpumanager] the static policy requires systemreserved.cpu + kubereserved.cpu to be greater than zero")]
    Zero,
    /// `reservedSystemCPUs` does not match the reservation, or the machine has fewer CPUs.
    #[error("[cpumanager] unable to reserve the required amount of CPUs (size of {cpus} did not equal {count})")]
    Size {
        /// The CPUs that would be reserved.
        cpus: CpuSet,
        /// Number of CPUs to reserve.
        count: usize,
    },
    /// `reservedSystemCPUs` has a CPU that is not online.
    #[error("[cpumanager] unable to build the reserved physical CPUs from the reserved set: unknown CPU ID: {0}")]
    Offline(u32),
}

impl ReservedCpus {
    /// Chooses the reserved CPUs.
    ///
    /// `reservation` is `systemReserved.cpu` plus `kubeReserved.cpu`, rounded up to whole CPUs. `explicit` is
    /// `reservedSystemCPUs`; if it is empty, the allocator chooses, which takes the lowest cores first.
    ///
    /// # Errors
    /// The reservation is zero, or is not met exactly.
    pub fn choose(
        topology: &CpuTopology,
        reservation: Amount,
        explicit: &CpuSet,
        options: StaticOptions,
    ) -> Result<Self, CpuReservationError> {
        let count = usize::try_from(reservation.value()).unwrap_or(0);
        if count == 0 {
            return Err(CpuReservationError::Zero);
        }
        let cpus = match explicit.is_empty() {
            // Too few CPUs are reported as a wrong size below.
            true => options.take(topology, &topology.all(), count).unwrap_or_default(),
            false => explicit.clone(),
        };
        if cpus.len() != count {
            return Err(CpuReservationError::Size { cpus, count });
        }
        let mut cores = Vec::with_capacity(count);
        for cpu in cpus.iter() {
            cores.push(topology.cpus.get(&cpu).ok_or(CpuReservationError::Offline(cpu))?.core);
        }
        let whole_cores = topology.select(|info| cores.contains(&info.core));
        Ok(Self { cpus, whole_cores })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::machines::{machine_a, machine_b};

    fn cpus(text: &str) -> CpuSet {
        CpuSet::parse(text).expect(text)
    }

    fn choose(topology: &CpuTopology, reservation: &str, explicit: &str) -> Result<ReservedCpus, CpuReservationError> {
        let reservation = Amount::parse(reservation).expect(reservation);
        ReservedCpus::choose(topology, reservation, &cpus(explicit), StaticOptions::default())
    }

    #[test]
    fn the_lowest_cores_are_reserved_unless_the_set_is_configured() {
        let (a, b) = (machine_a(), machine_b());
        for (topology, reservation, explicit, expected, whole_cores) in [
            (&a, "1", "", "0", "0,4"),
            (&a, "500m", "", "0", "0,4"),
            (&a, "2", "", "0,4", "0,4"),
            (&a, "1001m", "", "0,4", "0,4"),
            (&a, "3", "", "0-1,4", "0-1,4-5"),
            (&a, "8", "", "0-7", "0-7"),
            (&a, "2", "1-2", "1-2", "1-2,5-6"),
            (&b, "2", "", "0,6", "0,6"),
            (&b, "2", "1,6", "1,6", "0-1,6-7"),
        ] {
            let expected = ReservedCpus { cpus: cpus(expected), whole_cores: cpus(whole_cores) };
            assert_eq!(choose(topology, reservation, explicit), Ok(expected), "{reservation} {explicit}");
        }
    }

    #[test]
    fn a_reservation_that_is_not_met_exactly_is_refused() {
        let size = |cpus: &str, count: usize| {
            format!("[cpumanager] unable to reserve the required amount of CPUs (size of {cpus} did not equal {count})")
        };
        let zero =
            "[cpumanager] the static policy requires systemreserved.cpu + kubereserved.cpu to be greater than zero";
        let offline =
            "[cpumanager] unable to build the reserved physical CPUs from the reserved set: unknown CPU ID: 8";
        for (reservation, explicit, expected) in [
            ("0", "", zero.to_owned()),
            ("0", "0-1", zero.to_owned()),
            ("9", "", size("", 9)),
            ("1", "0-1", size("0-1", 1)),
            ("3", "0-1", size("0-1", 3)),
            ("2", "7-8", offline.to_owned()),
        ] {
            let error = choose(&machine_a(), reservation, explicit).expect_err(&expected);
            assert_eq!(error.to_string(), expected);
        }
    }
}
