//! CPU usage rates between two samples. Sole owner of the previous samples.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

/// Maximum number of samples; more than a node has pods and containers.
const MOST: usize = 10_000;
/// Minimum interval between two samples for a meaningful rate, nanoseconds.
const SHORTEST_NS: i64 = 500_000_000;

/// A counter value with its time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Sample {
    at_ns: i64,
    usage_ns: u64,
}

/// The last sample of each pod and container, with the last rate.
#[derive(Debug, Default)]
pub struct Meter {
    known: Mutex<BTreeMap<String, (Sample, Option<u64>)>>,
}

impl Meter {
    /// Nanocores used since the previous sample; `None` for the first one, and where time or counter went backwards.
    /// Samples within the minimum interval return the last rate.
    pub fn rate(&self, id: &str, at_ns: i64, usage_ns: u64) -> Option<u64> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Sample { at_ns, usage_ns };
        let Some((before, last_rate)) = known.get_mut(id) else {
            // More than a node can have: some were not dropped after their removal.
            if known.len() >= MOST {
                known.clear();
            }
            known.insert(id.to_owned(), (now, None));
            return None;
        };
        let is_close = (0..SHORTEST_NS).contains(&at_ns.saturating_sub(before.at_ns)) && before.usage_ns <= usage_ns;
        if !is_close {
            *last_rate = rate(*before, now);
            *before = now;
        }
        *last_rate
    }

    /// Drops the sample of a removed pod or container.
    pub fn remove(&self, id: &str) {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
    }
}

fn rate(before: Sample, now: Sample) -> Option<u64> {
    let elapsed = u64::try_from(now.at_ns.checked_sub(before.at_ns)?).ok().filter(|ns| *ns > 0)?;
    let used = now.usage_ns.checked_sub(before.usage_ns)?;
    u64::try_from(u128::from(used) * 1_000_000_000 / u128::from(elapsed)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000_000;

    #[test]
    fn rates_need_two_samples() {
        let meter = Meter::default();
        assert_eq!(meter.rate("a", 0, 5), None, "no look before");
        assert_eq!(meter.rate("a", 10 * SECOND, 5_000_000_005), Some(500_000_000));
        assert_eq!(meter.rate("a", 10 * SECOND + 5, 5_000_000_009), Some(500_000_000), "too close");
        assert_eq!(meter.rate("a", 11 * SECOND, 5_000_000_005), Some(0), "idle");
        assert_eq!(meter.rate("a", 12 * SECOND, 0), None, "the counter went back");
        assert_eq!(meter.rate("a", 3 * SECOND, 9), None, "time went back");
        assert_eq!(meter.rate("b", 3 * SECOND, 9), None);
        meter.remove("a");
        assert_eq!(meter.rate("a", 30 * SECOND, 9), None);
        for number in 0..MOST + 5 {
            meter.rate(&number.to_string(), 0, 0);
        }
        assert!(meter.known.lock().expect("whole").len() <= MOST);
    }
}
