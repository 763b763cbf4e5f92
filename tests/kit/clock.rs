//! A wall clock that follows tokio's clock, so that pausing one pauses both.

use berth::engine::ports::Clock;
use jiff::{Timestamp, ToSpan};
use tokio::time::Instant;

/// Wall time = a fixed start + what tokio's clock has advanced since.
#[derive(Debug, Clone)]
pub struct TokioClock {
    wall: Timestamp,
    start: Instant,
}

impl TokioClock {
    /// Starts at 2026-01-01T00:00:00Z. Needs a tokio runtime.
    pub fn new() -> Self {
        Self { wall: Timestamp::from_second(1_767_225_600).expect("in range"), start: Instant::now() }
    }
}

impl Clock for TokioClock {
    fn now(&self) -> Timestamp {
        let elapsed = i64::try_from(self.start.elapsed().as_nanos()).expect("tests do not run for 292 years");
        self.wall + elapsed.nanoseconds()
    }
}
