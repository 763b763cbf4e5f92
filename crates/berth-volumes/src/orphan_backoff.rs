//! Retry back-off and rate-limited logging for orphaned pod directories that cannot be removed.
//!
//! A thousand such directories produce a few log lines a minute: each line names one directory and counts the others.
//! Implements spec 07 §5.4.

use std::{
    collections::{HashMap, HashSet},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;
use tracing::warn;

use berth_metrics::OrphanMetrics;
use berth_sys::backoff::Backoff;
use berth_types::PodUid;

/// Initial and maximum back-off before a removal is retried.
pub const PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(122));
/// Minimum interval between two log lines.
const QUIET: Duration = Duration::from_secs(10);

/// Failed removals by pod.
pub struct OrphanBackoff {
    metrics: OrphanMetrics,
    state: Mutex<BackoffState>,
}

#[derive(Default)]
struct BackoffState {
    pods: HashMap<PodUid, FailedRemoval>,
    last_line: Option<Instant>,
    /// New failures not yet counted in a log line.
    unreported: u64,
}

struct FailedRemoval {
    error: String,
    again_at: Instant,
    backoff: Backoff,
}

impl OrphanBackoff {
    /// Creates an instance without failures.
    pub fn new(metrics: OrphanMetrics) -> Self {
        Self { metrics, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, BackoffState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a sweep with these pods on disk; forgets pods whose directories no longer exist.
    pub fn start_sweep(&self, found: &[PodUid]) {
        let found: HashSet<&PodUid> = found.iter().collect();
        let mut state = self.state();
        state.pods.retain(|pod, _| found.contains(pod));
        self.metrics.begin(state.pods.len());
    }

    /// Returns the last error while its back-off lasts.
    pub fn error_in_backoff(&self, pod: &PodUid) -> Option<String> {
        let state = self.state();
        let refusal = state.pods.get(pod)?;
        (Instant::now() < refusal.again_at).then(|| refusal.error.clone())
    }

    /// Records the removal of a directory; `had_volumes` if it contained a volume.
    pub fn removed(&self, pod: &PodUid, had_volumes: bool) {
        let mut state = self.state();
        state.pods.remove(pod);
        self.metrics.cleaned(had_volumes, state.pods.len());
    }

    /// Records a failed removal and doubles its back-off.
    pub fn record_failure(&self, pod: &PodUid, error: &str) {
        let mut state = self.state();
        let last = state.pods.get(pod);
        let mut backoff = last.map_or(Backoff::new(PAUSE.0, PAUSE.1), |last| last.backoff);
        let is_new = last.is_none_or(|last| last.error != error);
        let now = Instant::now();
        let again_at = now + backoff.next_delay();
        state.pods.insert(pod.clone(), FailedRemoval { error: error.to_owned(), again_at, backoff });
        self.metrics.failed(state.pods.len());
        if is_new {
            state.unreported = state.unreported.saturating_add(1);
        }
        let is_time = state.last_line.is_none_or(|last| now.duration_since(last) >= QUIET);
        if state.unreported > 0 && is_time {
            let others = state.unreported.saturating_sub(1);
            (state.last_line, state.unreported) = (Some(now), 0);
            warn!(podUID = %pod, err = error, others, "Failed to remove orphaned pod directory");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_metrics::Registry;

    /// Number of new log lines, 0 or 1.
    fn lines(refused: &OrphanBackoff, last: &mut Option<Instant>) -> usize {
        let now = refused.state().last_line;
        let is_new = now != *last;
        *last = now;
        usize::from(is_new)
    }

    #[tokio::test(start_paused = true)]
    async fn a_thousand_are_a_few_lines_a_minute() {
        let refused = OrphanBackoff::new(OrphanMetrics::new(&Registry::new()));
        let pods: Vec<PodUid> = (0..1_000).map(|n| PodUid::from(format!("u{n}"))).collect();
        let (mut logged, mut last, began) = (0, None, Instant::now());
        while began.elapsed() < Duration::from_secs(60) {
            refused.start_sweep(&pods);
            for pod in &pods {
                if refused.error_in_backoff(pod).is_none() {
                    refused.record_failure(pod, &format!("{pod} is not empty"));
                    logged += lines(&refused, &mut last);
                }
            }
            tokio::time::advance(Duration::from_secs(2)).await;
        }
        assert!((1..=10).contains(&logged), "{logged} lines");
        assert_eq!(refused.state().unreported, 0, "all of them are counted");
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_and_end() {
        let registry = Registry::new();
        let refused = OrphanBackoff::new(OrphanMetrics::new(&registry));
        let pod = PodUid::from("u");
        let gauge = |name: &str| {
            let families = registry.gather();
            let family = families.iter().find(|family| family.name() == name);
            family.map(|family| family.get_metric()[0].get_gauge().get_value())
        };
        let (good, bad) = ("kubelet_orphan_pod_cleaned_volumes", "kubelet_orphan_pod_cleaned_volumes_errors");
        assert_eq!(refused.error_in_backoff(&pod), None);
        for expected in [500, 1_000, 2_000] {
            refused.record_failure(&pod, "no");
            assert_eq!(refused.error_in_backoff(&pod), Some("no".to_owned()));
            tokio::time::advance(Duration::from_millis(expected - 1)).await;
            assert!(refused.error_in_backoff(&pod).is_some(), "{expected}");
            tokio::time::advance(Duration::from_millis(1)).await;
            assert_eq!(refused.error_in_backoff(&pod), None, "{expected}");
        }
        assert_eq!((gauge(good), gauge(bad)), (Some(0.0), Some(1.0)));
        refused.removed(&pod, true);
        assert_eq!((gauge(good), gauge(bad)), (Some(1.0), Some(0.0)));
        refused.record_failure(&pod, "no");
        refused.start_sweep(&[]);
        assert_eq!((refused.state().pods.len(), gauge(good), gauge(bad)), (0, Some(0.0), Some(0.0)));
    }
}
