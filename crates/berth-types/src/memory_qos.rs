//! Memory QoS on cgroup v2: `memory.min`, `memory.low`, and `memory.high` from requests and limits. Pure.
//! Implements spec 06a §10.2.

use super::qos::Qos;

/// `memoryReservationPolicy`: which memory requests the kernel protects from reclaim.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum MemoryReservationPolicy {
    /// No request.
    #[default]
    None,
    /// Requests of Guaranteed pods by `memory.min`, those of other pods by `memory.low`.
    TieredReservation,
}

/// File that protects the memory requests of a class: `memory.min` is never reclaimed, `memory.low` last.
pub fn protection_file(class: Qos) -> &'static str {
    if class == Qos::Guaranteed { "memory.min" } else { "memory.low" }
}

/// Settings of memory QoS that the values of containers depend on.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct MemoryQos {
    /// `memoryReservationPolicy`.
    pub policy: MemoryReservationPolicy,
    /// `memoryThrottlingFactor`, above 0 and at most 1.
    pub throttling_factor: f64,
    /// Memory that the reservations of the node leave, in bytes: the limit of containers without one.
    pub allocatable_bytes: u64,
    /// Page size of the kernel, in bytes.
    pub page_bytes: u64,
}

impl MemoryQos {
    /// Files and values of a container with a memory request and limit in bytes; 0 if it has none.
    pub fn of_container(&self, class: Qos, request: u64, limit: u64) -> Vec<(&'static str, u64)> {
        let mut values = match self.policy {
            MemoryReservationPolicy::TieredReservation if request > 0 => vec![(protection_file(class), request)],
            _ => vec![("memory.min", 0), ("memory.low", 0)],
        };
        values.extend(self.throttled_from(request, limit).map(|bytes| ("memory.high", bytes)));
        values
    }

    /// Usage in bytes from which the kernel throttles and reclaims: between request and limit, rounded down to a page.
    fn throttled_from(&self, request: u64, limit: u64) -> Option<u64> {
        if request == limit {
            return None;
        }
        let base = if limit > 0 { limit } else { self.allocatable_bytes };
        #[allow(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the reference computes in floating point; a negative result becomes 0"
        )]
        let bytes = (request as f64 + (base as f64 - request as f64) * self.throttling_factor).floor() as u64;
        let rounded = bytes - bytes.checked_rem(self.page_bytes).unwrap_or(0);
        (rounded > request && i64::try_from(rounded).is_ok()).then_some(rounded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const TIERED: MemoryQos = MemoryQos {
        policy: MemoryReservationPolicy::TieredReservation,
        throttling_factor: 0.9,
        allocatable_bytes: 32 << 30,
        page_bytes: 4096,
    };

    #[test]
    fn throttling_begins_between_request_and_limit() {
        for (request, limit, factor, page, high) in [
            (128 * MIB, 256 * MIB, 0.9, 4096, Some(255_012_864)),
            (128 * MIB, 0, 0.9, 4096, Some(30_937_186_304)), // AC-06a-25
            (64 * MIB, 512 * MIB, 0.9, 4096, Some(489_893_888)),
            (256 * MIB, 512 * MIB, 1.0, 4096, Some(512 * MIB)),
            (1 << 30, 2 << 30, 0.5, 4096, Some(1_610_612_736)),
            (0, 256 * MIB, 0.9, 4096, Some(241_590_272)),
            (128 * MIB, 256 * MIB, 0.9, 65_536, Some(255_000_576)),
            (1000, 8000, 0.9, 4096, Some(4096)),
            (1000, 2000, 0.9, 4096, None),
            (4096, 8192, 0.9, 4096, None),
            (512 * MIB, 512 * MIB, 0.9, 4096, None),
            (0, 0, 0.9, 4096, None),
            (128 * MIB, 128 * MIB + 1, 0.9, 4096, None),
            (64 << 30, 0, 0.9, 4096, None),
            (1, u64::MAX, 1.0, 4096, None),
        ] {
            let qos = MemoryQos { throttling_factor: factor, page_bytes: page, ..TIERED };
            let values = qos.of_container(Qos::Burstable, request, limit);
            let got = values.iter().find(|(file, _)| *file == "memory.high").map(|(_, bytes)| *bytes);
            assert_eq!(got, high, "{request} {limit} {factor} {page}");
        }
        let unknown = MemoryQos { allocatable_bytes: 0, ..TIERED };
        assert_eq!(unknown.of_container(Qos::Burstable, MIB, 0), [("memory.low", MIB)]);
    }

    #[test]
    fn requests_are_protected_by_class_and_policy() {
        let none = MemoryQos { policy: MemoryReservationPolicy::None, ..TIERED };
        let zero = [("memory.min", 0), ("memory.low", 0)];
        for (qos, class, request, expected) in [
            (TIERED, Qos::Guaranteed, MIB, &[("memory.min", MIB)][..]),
            (TIERED, Qos::Burstable, MIB, &[("memory.low", MIB)]),
            (TIERED, Qos::BestEffort, 0, &zero),
            (TIERED, Qos::Burstable, 0, &zero),
            (none, Qos::Guaranteed, MIB, &zero),
        ] {
            assert_eq!(qos.of_container(class, request, request), expected, "{class:?} {request}");
        }
    }
}
