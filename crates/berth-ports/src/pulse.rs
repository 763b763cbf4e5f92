//! The sign of life that a lasting task gives, so that one which hangs is missed (spec 05 §11).

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

/// How long a step of a task may take.
const LIMIT: Duration = Duration::from_secs(300);
/// When a task that rests is to be heard of again.
const NEVER: u64 = u64::MAX;

/// A task's sign of life; cheap to give at every turn. One that nobody has given yet is of a task that rests.
#[derive(Clone, Debug)]
pub struct Pulse(Arc<Signs>);

#[derive(Debug)]
struct Signs {
    start: Instant,
    last: AtomicU64,
    due: AtomicU64,
}

impl Pulse {
    /// Works on a step; says so again at the next one.
    pub fn works(&self) {
        self.expects(Duration::ZERO);
    }

    /// Works on, or waits for, what takes so long by itself.
    pub fn expects(&self, longest: Duration) {
        let now = self.elapsed();
        self.0.last.store(now, Ordering::Relaxed);
        self.0.due.store(now.saturating_add(millis(longest.saturating_add(LIMIT))), Ordering::Relaxed);
    }

    /// Waits for something to happen, however long that takes.
    pub fn rests(&self) {
        self.0.due.store(NEVER, Ordering::Relaxed);
    }

    /// How long nothing was heard of a task that should have been heard of.
    pub fn silent_for(&self) -> Option<Duration> {
        let now = self.elapsed();
        let is_late = now > self.0.due.load(Ordering::Relaxed);
        is_late.then(|| Duration::from_millis(now.saturating_sub(self.0.last.load(Ordering::Relaxed))))
    }

    fn elapsed(&self) -> u64 {
        millis(self.0.start.elapsed())
    }
}

impl Default for Pulse {
    fn default() -> Self {
        Self(Arc::new(Signs { start: Instant::now(), last: AtomicU64::default(), due: AtomicU64::new(NEVER) }))
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(NEVER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_works_is_missed_and_who_rests_is_not() {
        let pulse = Pulse::default();
        let after = async |seconds| {
            tokio::time::advance(Duration::from_secs(seconds)).await;
            pulse.silent_for().map(|silent| silent.as_secs())
        };
        assert_eq!(after(100_000).await, None, "it has not begun");
        pulse.works();
        assert_eq!((after(300).await, after(1).await), (None, Some(301)));
        pulse.expects(Duration::from_secs(900));
        assert_eq!((after(1200).await, after(1).await), (None, Some(1201)));
        pulse.rests();
        assert_eq!(after(100_000).await, None);
        pulse.expects(Duration::MAX);
        assert_eq!(after(100_000).await, None);
    }
}
