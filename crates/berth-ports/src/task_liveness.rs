//! Liveness of long-running tasks: detects a task that hangs (spec 05 §11).

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

/// Maximum duration of one step of a task.
const LIMIT: Duration = Duration::from_secs(300);
/// Deadline of an idle task.
const NEVER: u64 = u64::MAX;

/// Liveness of a task; cheap to update in every iteration. Starts as idle.
#[derive(Clone, Debug)]
pub struct TaskLiveness(Arc<LivenessState>);

#[derive(Debug)]
struct LivenessState {
    start: Instant,
    last: AtomicU64,
    due: AtomicU64,
}

impl TaskLiveness {
    /// Reports progress: the next report is due within 5 minutes.
    pub fn report_progress(&self) {
        self.expect_within(Duration::ZERO);
    }

    /// Reports progress before an operation or wait that takes up to `longest`.
    pub fn expect_within(&self, longest: Duration) {
        let now = self.elapsed();
        self.0.last.store(now, Ordering::Relaxed);
        self.0.due.store(now.saturating_add(millis(longest.saturating_add(LIMIT))), Ordering::Relaxed);
    }

    /// Marks the task as idle: it waits for an event without a deadline.
    pub fn mark_idle(&self) {
        self.0.due.store(NEVER, Ordering::Relaxed);
    }

    /// Time since the last report if the next one is overdue; otherwise `None`.
    pub fn overdue_for(&self) -> Option<Duration> {
        let now = self.elapsed();
        let is_late = now > self.0.due.load(Ordering::Relaxed);
        is_late.then(|| Duration::from_millis(now.saturating_sub(self.0.last.load(Ordering::Relaxed))))
    }

    fn elapsed(&self) -> u64 {
        millis(self.0.start.elapsed())
    }
}

impl Default for TaskLiveness {
    fn default() -> Self {
        Self(Arc::new(LivenessState { start: Instant::now(), last: AtomicU64::default(), due: AtomicU64::new(NEVER) }))
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(NEVER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_overdue_task_is_reported_and_an_idle_one_is_not() {
        let liveness = TaskLiveness::default();
        let after = async |seconds| {
            tokio::time::advance(Duration::from_secs(seconds)).await;
            liveness.overdue_for().map(|silent| silent.as_secs())
        };
        assert_eq!(after(100_000).await, None, "it has not begun");
        liveness.report_progress();
        assert_eq!((after(300).await, after(1).await), (None, Some(301)));
        liveness.expect_within(Duration::from_secs(900));
        assert_eq!((after(1200).await, after(1).await), (None, Some(1201)));
        liveness.mark_idle();
        assert_eq!(after(100_000).await, None);
        liveness.expect_within(Duration::MAX);
        assert_eq!(after(100_000).await, None);
    }
}
