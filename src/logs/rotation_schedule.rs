//! Schedule of log size checks and rotations, by growth rate. Pure. Implements spec 03b §11.
//!
//! A log that is being written is checked again before it can reach the limit, by its last growth rate. An idle log is
//! checked when inotify reports a write, and at each regular interval.

use std::time::Duration;

/// Minimum and maximum delay between two checks of a log that is being written.
const SOONEST: Duration = Duration::from_millis(50);
const LATEST: Duration = Duration::from_secs(1);
/// Delay until the check after the first write to an idle log.
pub const BEGUN: Duration = Duration::from_millis(100);
/// Minimum interval between two rotations of a log: rotated files are named by the second.
const APART: Duration = Duration::from_secs(1);

/// Growth state of a log; times count from an arbitrary start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrowthRate {
    size: u64,
    at: Duration,
    rotated: Option<Duration>,
}

/// Result of a size check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckResult {
    /// The log must be rotated now.
    Rotate,
    /// Next check at that time.
    Again(Duration),
    /// The log is idle.
    Idle,
}

impl GrowthRate {
    /// State of a log at its first check.
    pub fn new(size: u64, now: Duration) -> Self {
        Self { size, at: now, rotated: None }
    }

    /// Size at the last check.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Records a check with that size.
    pub fn record_check(&mut self, size: u64, max: u64, now: Duration) -> CheckResult {
        // Smaller than before: it is another file.
        let grown = size.checked_sub(self.size).unwrap_or(size);
        let passed = now.saturating_sub(self.at);
        (self.size, self.at) = (size, now);
        if size >= max {
            let free = self.rotated.map(|at| at.saturating_add(APART)).filter(|free| *free > now);
            return free.map_or(CheckResult::Rotate, CheckResult::Again);
        }
        if grown == 0 {
            return CheckResult::Idle;
        }
        let left = max.saturating_sub(size);
        let until_full = u128::from(left).saturating_mul(passed.as_nanos()) / u128::from(grown);
        let until_full = Duration::from_nanos(u64::try_from(until_full).unwrap_or(u64::MAX));
        CheckResult::Again(now.saturating_add(until_full.clamp(SOONEST, LATEST)))
    }

    /// Records a rotation: the log is empty.
    pub fn rotate(&mut self, now: Duration) {
        *self = Self { size: 0, at: now, rotated: Some(now) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: u64 = 10_000_000;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn the_next_check_comes_before_the_log_can_be_full() {
        for (name, size, at, expected) in [
            ("nothing was written", 1_000_000, 500, CheckResult::Idle),
            ("a line", 1_000_100, 500, CheckResult::Again(ms(1500))),
            ("ten times a second is full", 2_000_000, 100, CheckResult::Again(ms(900))),
            ("nearly full", 9_999_999, 100, CheckResult::Again(ms(150))),
            ("full", MAX, 100, CheckResult::Rotate),
            ("in no time at all", 2_000_000, 0, CheckResult::Again(ms(50))),
            ("another file", 500, 100, CheckResult::Again(ms(1100))),
            ("another, empty file", 0, 100, CheckResult::Idle),
            ("more than there is", u64::MAX, u64::MAX, CheckResult::Rotate),
        ] {
            let mut pace = GrowthRate::new(1_000_000, ms(0));
            assert_eq!(pace.record_check(size, MAX, ms(at)), expected, "{name}");
        }
    }

    #[test]
    fn a_log_is_rotated_once_a_second_at_most() {
        let mut pace = GrowthRate::new(0, ms(0));
        assert_eq!(pace.record_check(MAX, MAX, ms(10)), CheckResult::Rotate);
        pace.rotate(ms(20));
        assert_eq!(pace.record_check(MAX, MAX, ms(300)), CheckResult::Again(ms(1020)));
        assert_eq!(pace.record_check(2 * MAX, MAX, ms(1020)), CheckResult::Rotate);
    }
}
