//! Wall time, injected so that tests and the simulation decide what time it is.
//! Durations and deadlines use tokio's clock, which tests pause.

use jiff::Timestamp;

/// Tells the wall time.
pub trait Clock: Send + Sync + 'static {
    /// Now.
    fn now(&self) -> Timestamp;
}

/// The machine's clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        Timestamp::now()
    }
}
