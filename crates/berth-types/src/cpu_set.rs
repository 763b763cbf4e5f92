//! CPU sets in kernel list format: `0-3,8`. Pure.

use std::{collections::BTreeSet, fmt};

use crate::fieldpath::quoted;

/// Exclusive upper bound of CPU numbers: more CPUs than any machine has.
const MOST: u32 = 1 << 16;

/// The text is not a CPU list; the text is the reference's.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CpuSetError {
    /// A part is not a number.
    #[error("strconv.Atoi: parsing {}: invalid syntax", quoted(.0))]
    Number(String),
    /// A range is descending, or beyond the largest CPU number.
    #[error("invalid range {} ({first} > {last})", quoted(.range))]
    Range {
        /// The range as given.
        range: String,
        /// Its first CPU.
        first: u32,
        /// Its last CPU.
        last: u32,
    },
}

/// A set of logical CPUs.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct CpuSet(BTreeSet<u32>);

impl CpuSet {
    /// Parses comma-separated numbers and ranges; an empty text is the empty set.
    ///
    /// # Errors
    /// The text has another format.
    pub fn parse(text: &str) -> Result<Self, CpuSetError> {
        let mut ranges = Vec::new();
        for range in text.split(',').filter(|_| !text.is_empty()) {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last) = (number(first)?, number(last)?);
            if first > last || last >= MOST {
                return Err(CpuSetError::Range { range: range.to_owned(), first, last });
            }
            ranges.push((first, last));
        }
        // Visits each CPU once, however often the text contains it.
        ranges.sort_unstable();
        let mut next = 0;
        let mut new = |(first, last): (u32, u32)| {
            let from = first.max(next);
            next = next.max(last + 1);
            from..=last
        };
        Ok(ranges.into_iter().flat_map(&mut new).collect())
    }

    /// Number of CPUs.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the set has a CPU.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// Whether all CPUs are in `other`.
    pub fn is_subset(&self, other: &Self) -> bool {
        self.0.is_subset(&other.0)
    }

    /// Whether no CPU is in `other`.
    pub fn is_disjoint(&self, other: &Self) -> bool {
        self.0.is_disjoint(&other.0)
    }

    /// CPUs of either set.
    pub fn union(&self, other: &Self) -> Self {
        Self(&self.0 | &other.0)
    }

    /// CPUs of both sets.
    pub fn intersection(&self, other: &Self) -> Self {
        Self(&self.0 & &other.0)
    }

    /// CPUs that are not in `other`.
    pub fn difference(&self, other: &Self) -> Self {
        Self(&self.0 - &other.0)
    }

    /// Iterates over the CPUs in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.iter().copied()
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        Self(cpus.into_iter().collect())
    }
}

impl Extend<u32> for CpuSet {
    fn extend<I: IntoIterator<Item = u32>>(&mut self, cpus: I) {
        self.0.extend(cpus);
    }
}

/// The list in its shortest form.
impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for &cpu in &self.0 {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == cpu => *last = cpu,
                _ => ranges.push((cpu, cpu)),
            }
        }
        for (index, (first, last)) in ranges.into_iter().enumerate() {
            let separator = if index > 0 { "," } else { "" };
            match first == last {
                true => write!(f, "{separator}{first}")?,
                false => write!(f, "{separator}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

fn number(text: &str) -> Result<u32, CpuSetError> {
    text.parse().map_err(|_| CpuSetError::Number(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_read_and_written() {
        for (text, written, count) in [
            ("", "", 0),
            ("0", "0", 1),
            ("5-5", "5", 1),
            ("0-3,8", "0-3,8", 5),
            ("0,2,4-6", "0,2,4-6", 5),
            ("3,1,2", "1-3", 3),
            ("0-1,1-2", "0-2", 3),
        ] {
            let set = CpuSet::parse(text).expect(text);
            assert_eq!((set.to_string().as_str(), set.len()), (written, count), "{text}");
        }
        for bad in ["a", "1-", "-1", "3-1", "1,,2", "0-99999999", "0-4294967295", " 1"] {
            assert!(CpuSet::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn errors_are_those_of_the_reference() {
        for (text, error) in [
            ("x", "strconv.Atoi: parsing \"x\": invalid syntax"),
            ("3-1", "invalid range \"3-1\" (3 > 1)"),
            ("1,", "strconv.Atoi: parsing \"\": invalid syntax"),
        ] {
            assert_eq!(CpuSet::parse(text).expect_err(text).to_string(), error, "{text}");
        }
    }
}
