//! CPU sets in kernel list format: `0-3,8`. Pure.

use std::{collections::BTreeSet, fmt};

use berth_config::validation::cpus;

/// The text is not a CPU list.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("invalid CPU list {0:?}, expected a list such as \"0-3,8\"")]
pub struct CpuSetError(String);

/// A set of logical CPUs.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CpuSet(BTreeSet<u32>);

impl CpuSet {
    /// Parses comma-separated numbers and ranges; an empty text is the empty set.
    ///
    /// # Errors
    /// The text has another format.
    pub fn parse(text: &str) -> Result<Self, CpuSetError> {
        cpus::parse(text).map(Self).map_err(|_| CpuSetError(text.to_owned()))
    }

    /// Number of CPUs.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether all CPUs are in `other`.
    pub fn is_subset(&self, other: &Self) -> bool {
        self.0.is_subset(&other.0)
    }

    /// Iterates over the CPUs in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.iter().copied()
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&cpus::show(&self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_read_and_written() {
        for (text, written, count) in
            [("", "", 0), ("0", "0", 1), ("0-3,8", "0-3,8", 5), ("3,1,2", "1-3", 3), ("0-1,1-2", "0-2", 3)]
        {
            let set = CpuSet::parse(text).expect(text);
            assert_eq!((set.to_string().as_str(), set.len()), (written, count), "{text}");
        }
        for bad in ["a", "1-", "-1", "3-1", "1,,2", "0-99999999", " 1"] {
            assert!(CpuSet::parse(bad).is_err(), "{bad}");
        }
    }
}
