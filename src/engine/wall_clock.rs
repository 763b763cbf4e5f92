//! Wall clock jump detection: clock changes and machine sleep require re-evaluating deadlines.
//!
//! Pure. Implements spec 05 §2.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

/// Largest difference between the clocks' progress between two readings that is not a jump.
const SLACK: SignedDuration = SignedDuration::from_secs(1);

/// Compares the wall clock with a monotonic clock that stops while the machine sleeps.
#[derive(Clone, Copy, Debug, Default)]
pub struct WallClock {
    last: Option<(Timestamp, Duration)>,
}

impl WallClock {
    /// Takes a reading of both clocks; returns by how much the wall clock jumped since the last one.
    pub fn detect_jump(&mut self, wall: Timestamp, uptime: Duration) -> Option<SignedDuration> {
        let (wall_before, before) = self.last.replace((wall, uptime))?;
        let passed = SignedDuration::try_from(uptime.saturating_sub(before)).unwrap_or(SignedDuration::MAX);
        let jump = wall.duration_since(wall_before).saturating_sub(passed);
        (jump.abs() > SLACK).then_some(jump)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_was_set_and_a_machine_that_slept_are_noticed() {
        let mut clock = WallClock::default();
        let mut detect = |wall, uptime| {
            let wall = Timestamp::from_millisecond(wall).expect("in range");
            clock.detect_jump(wall, Duration::from_millis(uptime)).map(|jump| jump.as_secs())
        };
        for (wall, uptime, expected) in [
            (1_000_000, 0, None),
            (1_002_000, 2_000, None),
            (1_003_000, 4_000, None), // the wall clock is slewed
            (4_605_000, 6_000, Some(3600)),
            (4_607_000, 8_000, None),
            (1_000_000, 10_000, Some(-3609)),
            (1_060_000, 70_000, None), // a slow iteration
        ] {
            assert_eq!(detect(wall, uptime), expected, "{wall} {uptime}");
        }
    }
}
