//! Table of host ID ranges by pod. Pure. Implements spec 06 §5.1, §5.3.

use std::collections::{BTreeMap, BTreeSet};

use super::id_space::IdSpace;
use berth_types::PodUid;

/// Why a range cannot be recorded or allocated.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum IdTableError {
    /// The length differs from that of the node.
    #[error("wrong user namespace length {0}")]
    Length(u32),
    /// The first ID is not a multiple of the length.
    #[error("wrong user namespace offset specified {0}")]
    Offset(u32),
    /// The pod has a different range.
    #[error("different user namespace range already used by pod {0:?}")]
    Different(PodUid),
    /// The range is outside the ID space.
    #[error("id {0} is out of range")]
    OutOfRange(u32),
    /// The range belongs to another pod.
    #[error("range picked for pod {0:?} already taken")]
    Taken(PodUid),
    /// All ranges are allocated.
    #[error("could not find an empty slot to allocate a user namespace")]
    Full,
}

/// Slots of equal size; the lowest free slot is allocated first.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IdTable {
    space: IdSpace,
    by_pod: BTreeMap<PodUid, u64>,
    used: BTreeSet<u64>,
}

impl IdTable {
    /// Creates an empty table for a checked ID space.
    pub fn new(space: IdSpace) -> Self {
        Self { space, by_pod: BTreeMap::new(), used: BTreeSet::new() }
    }

    /// Number of IDs per range.
    pub fn length(&self) -> u32 {
        u32::try_from(self.space.per_pod).unwrap_or(u32::MAX)
    }

    /// First host ID of a pod's range.
    pub fn of(&self, pod: &PodUid) -> Option<u32> {
        self.by_pod.get(pod).map(|slot| self.first_of(*slot))
    }

    /// All pods with a range.
    pub fn pods(&self) -> impl Iterator<Item = &PodUid> {
        self.by_pod.keys()
    }

    /// Records the range from a pod's file.
    ///
    /// # Errors
    /// The range does not fit the node, or collides with that of another pod.
    pub fn record(&mut self, pod: &PodUid, first: u32, length: u32) -> Result<(), IdTableError> {
        let per_pod = self.space.per_pod;
        if u64::from(length) != per_pod {
            return Err(IdTableError::Length(length));
        }
        if u64::from(first) % per_pod != 0 {
            return Err(IdTableError::Offset(first));
        }
        if self.of(pod).is_some_and(|present| present != first) {
            return Err(IdTableError::Different(pod.clone()));
        }
        let offset = u64::from(first).checked_sub(self.space.first).ok_or(IdTableError::OutOfRange(first))?;
        let slot = offset / per_pod;
        if slot >= self.slots() {
            return Err(IdTableError::OutOfRange(first));
        }
        if self.of(pod).is_none() && !self.used.insert(slot) {
            return Err(IdTableError::Taken(pod.clone()));
        }
        self.by_pod.insert(pod.clone(), slot);
        Ok(())
    }

    /// Allocates the lowest free range for a pod; returns its first host ID. Idempotent.
    ///
    /// # Errors
    /// All ranges are allocated.
    pub fn allocate(&mut self, pod: &PodUid) -> Result<u32, IdTableError> {
        if let Some(present) = self.of(pod) {
            return Ok(present);
        }
        let lowest = (0..).zip(&self.used).find(|(n, used)| n != *used).map_or(self.used.len() as u64, |(n, _)| n);
        if lowest >= self.slots() {
            return Err(IdTableError::Full);
        }
        self.used.insert(lowest);
        self.by_pod.insert(pod.clone(), lowest);
        Ok(self.first_of(lowest))
    }

    /// Releases the range of a pod.
    pub fn release(&mut self, pod: &PodUid) {
        if let Some(slot) = self.by_pod.remove(pod) {
            self.used.remove(&slot);
        }
    }

    fn slots(&self) -> u64 {
        self.space.length / self.space.per_pod
    }

    fn first_of(&self, slot: u64) -> u32 {
        u32::try_from(self.space.first + slot * self.space.per_pod).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const N: u32 = 65_536;

    fn table(slots: u64) -> IdTable {
        IdTable::new(IdSpace { first: N.into(), length: u64::from(N) * slots, per_pod: N.into() })
    }

    #[test]
    fn the_lowest_free_range_is_given_out() {
        // AC-06-8, AC-06-9
        let mut table = table(3);
        assert_eq!(table.allocate(&"a".into()), Ok(N));
        assert_eq!(table.allocate(&"b".into()), Ok(2 * N));
        assert_eq!(table.allocate(&"b".into()), Ok(2 * N));
        table.release(&"a".into());
        assert_eq!(table.allocate(&"c".into()), Ok(N));
        assert_eq!(table.allocate(&"d".into()), Ok(3 * N));
        assert_eq!(table.allocate(&"e".into()), Err(IdTableError::Full));
    }

    #[test]
    fn what_is_written_down_must_fit() {
        let mut table = table(3);
        assert_eq!(table.record(&"a".into(), N, N), Ok(()));
        assert_eq!(table.record(&"a".into(), N, N), Ok(()));
        for (pod, first, length, expected) in [
            // AC-06-11
            ("b", N, N - 1, "wrong user namespace length 65535"),
            ("b", N + 1, N, "wrong user namespace offset specified 65537"),
            ("a", 2 * N, N, "different user namespace range already used by pod \"a\""),
            ("b", 0, N, "id 0 is out of range"),
            ("b", 4 * N, N, "id 262144 is out of range"),
            ("b", N, N, "range picked for pod \"b\" already taken"),
        ] {
            assert_eq!(table.record(&pod.into(), first, length).unwrap_err().to_string(), expected);
        }
        assert_eq!(table.allocate(&"b".into()), Ok(2 * N));
    }

    proptest! {
        #[test]
        fn ranges_never_overlap(steps in prop::collection::vec((0_u8..8, prop::bool::ANY), 0..60)) {
            let mut table = table(6);
            for (pod, comes) in steps {
                let pod = PodUid::from(pod.to_string());
                if comes {
                    let _ = table.allocate(&pod);
                } else {
                    table.release(&pod);
                }
                let firsts: BTreeSet<u32> = table.pods().filter_map(|p| table.of(p)).collect();
                prop_assert_eq!(firsts.len(), table.pods().count());
                prop_assert!(firsts.iter().all(|f| (N..7 * N).contains(f)));
            }
        }
    }
}
