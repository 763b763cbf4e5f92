//! CPU usage rates between two samples. Sole owner of the previous samples.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use berth_cadvisor::reading::{CpuSample, RateMeter};

/// Maximum number of samples; more than a node has pods and containers.
const MOST: usize = 10_000;
/// The rate meter of each pod and container.
#[derive(Debug, Default)]
pub struct Meter {
    known: Mutex<BTreeMap<String, RateMeter>>,
}

impl Meter {
    /// Nanocores used since the previous sample; `None` for the first one, and where time or counter went backwards.
    /// Samples within half a second return the last rate.
    pub fn rate(&self, id: &str, at: i64, usage_ns: u64) -> Option<u64> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let now = CpuSample { at, usage_ns };
        if let Some(meter) = known.get_mut(id) {
            return meter.update(now);
        }
        // More than a node can have: some were not dropped after their removal.
        if known.len() >= MOST {
            known.clear();
        }
        known.entry(id.to_owned()).or_default().update(now)
    }

    /// Drops the sample of a removed pod or container.
    pub fn remove(&self, id: &str) {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000_000;

    #[test]
    fn rates_are_of_two_samples() {
        let meter = Meter::default();
        assert_eq!(meter.rate("a", 0, 5), None, "no earlier sample");
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
