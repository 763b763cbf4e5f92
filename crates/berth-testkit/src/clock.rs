//! Adjustable wall clock that follows tokio's clock, so that pausing one pauses both.

use std::sync::atomic::{AtomicI64, Ordering};

use berth_ports::Clock;
use jiff::{Timestamp, ToSpan};
use tokio::time::Instant;

/// Wall time = fixed start + elapsed time of tokio's clock + adjustments.
#[derive(Debug)]
pub struct TokioClock {
    wall: Timestamp,
    start: Instant,
    set: AtomicI64,
}

impl TokioClock {
    /// Starts at 2026-01-01T00:00:00Z. Needs a tokio runtime.
    pub fn new() -> Self {
        let wall = Timestamp::from_second(1_767_225_600).expect("in range");
        Self { wall, start: Instant::now(), set: AtomicI64::new(0) }
    }

    /// Adjusts the clock by so many milliseconds, forward or back.
    pub fn set(&self, by_milliseconds: i64) {
        self.set.fetch_add(by_milliseconds, Ordering::Relaxed);
    }
}

impl Clock for TokioClock {
    fn now(&self) -> Timestamp {
        let elapsed = i64::try_from(self.start.elapsed().as_nanos()).expect("tests do not run for 292 years");
        self.wall + elapsed.nanoseconds() + self.set.load(Ordering::Relaxed).milliseconds()
    }
}
