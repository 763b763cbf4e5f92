//! Time grid of regular probe attempts.
//!
//! The main cost of probes on an idle node is waking up. All attempts of probes with the same period are therefore
//! aligned to a common grid of the agent's monotonic clock, and probes that are due together wake the agent once.

use std::time::Duration;

use tokio::time::Instant;

/// Grid points per period…
const POINTS_PER_PERIOD: u32 = 10;
/// … and the maximum distance between two points.
const MAX_DISTANCE: Duration = Duration::from_secs(1);
/// Offset of the first point from the agent's start: other periodic work of the agent is due on whole seconds.
pub const OFFSET: Duration = Duration::from_millis(170);

/// Grid of an agent.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    first: Instant,
}

impl Schedule {
    /// Creates the grid of an agent that starts at `now`.
    pub fn starting(now: Instant) -> Self {
        Self { first: now + OFFSET }
    }

    /// The first grid point of that period that is not before `at`. A period is a whole number of distances, so a probe
    /// that starts on a point stays on the grid.
    pub fn at_or_after(&self, at: Instant, period: Duration) -> Instant {
        let passed = self.passed(at).next_multiple_of(distance(period).as_nanos());
        self.first + nanos(passed)
    }

    /// The last grid point of that period that is not after `at`; the first point for everything before it.
    pub fn at_or_before(&self, at: Instant, period: Duration) -> Instant {
        let passed = self.passed(at);
        self.first + nanos(passed - passed % distance(period).as_nanos())
    }

    fn passed(&self, at: Instant) -> u128 {
        at.saturating_duration_since(self.first).as_nanos()
    }
}

/// Distance between two points of a period.
fn distance(period: Duration) -> Duration {
    (period / POINTS_PER_PERIOD).clamp(Duration::from_nanos(1), MAX_DISTANCE)
}

fn nanos(number: u128) -> Duration {
    Duration::from_nanos(number.try_into().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(number: f64) -> Duration {
        Duration::from_secs_f64(number)
    }

    #[test]
    fn moments_of_probes_with_the_same_period_lie_on_common_marks() {
        let first = Instant::now() + Duration::from_secs(100);
        let schedule = Schedule { first };
        for (period, at, before, after) in [
            (10.0, 0.0, 0.0, 0.0),
            (10.0, 0.001, 0.0, 1.0),
            (10.0, 1.0, 1.0, 1.0),
            (10.0, 13.26, 13.0, 14.0),
            (1.0, 7.013, 7.0, 7.1),
            (3.0, 0.2, 0.0, 0.3),
            (41.0, 41.5, 41.0, 42.0),
            (3600.0, 3600.1, 3600.0, 3601.0),
        ] {
            let (at, period) = (first + seconds(at), seconds(period));
            assert_eq!(schedule.at_or_before(at, period), first + seconds(before), "{period:?} {at:?}");
            let point = schedule.at_or_after(at, period);
            assert_eq!(point, first + seconds(after), "{period:?} {at:?}");
            assert_eq!(schedule.at_or_after(point + period, period), point + period, "it stays on the grid");
        }
        let now = Instant::now();
        assert_eq!(Schedule::starting(now).at_or_after(now, seconds(10.0)), now + OFFSET);
        assert_eq!(schedule.at_or_before(now, seconds(10.0)), first, "before all points");
        assert_eq!(schedule.at_or_after(now, Duration::ZERO), first, "whatever the period");
    }
}
