//! Liveness timestamps of the sync loop for `/healthz` and the systemd watchdog (spec 02a §3).

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

/// Shared timestamps of the sync loop; cheap to update on every iteration.
#[derive(Clone, Debug)]
pub struct SyncLoopLiveness {
    start: Instant,
    beat: Arc<AtomicU64>,
    sweep: Arc<AtomicU64>,
}

impl SyncLoopLiveness {
    /// Starts with the current time as the first iteration.
    pub fn new() -> Self {
        Self { start: Instant::now(), beat: Arc::default(), sweep: Arc::default() }
    }

    /// Records an iteration of the sync loop.
    pub fn record_iteration(&self) {
        self.beat.store(self.elapsed(), Ordering::Relaxed);
    }

    /// Records the start of a sweep.
    pub fn record_sweep(&self) {
        self.sweep.store(self.elapsed(), Ordering::Relaxed);
    }

    /// Time since the last sweep began.
    pub fn since_sweep(&self) -> Duration {
        Duration::from_millis(self.elapsed().saturating_sub(self.sweep.load(Ordering::Relaxed)))
    }

    /// Monotonic time since creation.
    pub fn since_start(&self) -> Duration {
        self.start.elapsed()
    }

    /// Health check: `None` while the loop iterates at least every max(5 min, 2 × `sync_frequency`);
    /// else the text of the failed check.
    pub fn check(&self, sync_frequency: Duration) -> Option<&'static str> {
        let since = Duration::from_millis(self.elapsed().saturating_sub(self.beat.load(Ordering::Relaxed)));
        let limit = Duration::from_secs(300).max(sync_frequency * 2);
        (since > limit).then_some("sync Loop took longer than expected")
    }

    fn elapsed(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

impl Default for SyncLoopLiveness {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_loop_that_stands_still_is_noticed() {
        let heartbeat = SyncLoopLiveness::new();
        let minute = Duration::from_secs(60);
        tokio::time::advance(minute * 5).await;
        assert_eq!(heartbeat.check(minute), None);
        tokio::time::advance(minute).await;
        assert_eq!(heartbeat.check(minute), Some("sync Loop took longer than expected"));
        assert_eq!(heartbeat.check(minute * 4), None);
        heartbeat.record_iteration();
        assert_eq!(heartbeat.check(minute), None);
    }
}
