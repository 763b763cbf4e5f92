//! The grid on which the regular moments of probes lie.
//!
//! What a probe costs a node at rest is above all waking up for it. So all moments of probes with the same period lie on a
//! common grid of the agent's monotonic clock, and probes that are due together wake the agent once.

use std::time::Duration;

use tokio::time::Instant;

/// Points of the grid in a period…
const POINTS_PER_PERIOD: u32 = 10;
/// … and their distance at most.
const MAX_DISTANCE: Duration = Duration::from_secs(1);
/// From the agent's start to the first point: its other periodic work falls on whole seconds.
pub const OFFSET: Duration = Duration::from_millis(170);

/// The grid of an agent.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    first: Instant,
}

impl Schedule {
    /// For an agent that starts now.
    pub fn starting(now: Instant) -> Self {
        Self { first: now + OFFSET }
    }

    /// The first point of that period that is not before `at`. A period is a whole number of distances, so a probe that
    /// begins on a point stays on the grid.
    pub fn at_or_after(&self, at: Instant, period: Duration) -> Instant {
        let passed = self.passed(at).next_multiple_of(distance(period).as_nanos());
        self.first + nanos(passed)
    }

    /// The last point of that period that is not after `at`; the first one for everything before it.
    pub fn at_or_before(&self, at: Instant, period: Duration) -> Instant {
        let passed = self.passed(at);
        self.first + nanos(passed - passed % distance(period).as_nanos())
    }

    fn passed(&self, at: Instant) -> u128 {
        at.saturating_duration_since(self.first).as_nanos()
    }
}

/// From one point of a period to the next.
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
