//! Wall clock as a port, so that tests and the simulation control the time.
//!
//! Durations and deadlines use tokio's clock, which tests pause.

use jiff::Timestamp;

/// Source of wall-clock time.
pub trait Clock: Send + Sync + 'static {
    /// Current wall-clock time.
    fn now(&self) -> Timestamp;
}

/// The system's wall clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        Timestamp::now()
    }
}
