//! Kernel notifications of memory pressure (PSI, `memory.events`, memcg usage thresholds).
//!
//! Each one triggers a re-evaluation of thresholds before the next scheduled one.
//! Implements spec 05 §3.2 (`kernelMemcgNotification`), §3.10.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use tokio::{
    sync::{Notify, watch},
    time::sleep,
};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::ports::ThresholdNotifications;
use berth_sys::memory_events::{CgroupMemoryEvents, PressureTrigger, UsageThreshold};

/// PSI file of the whole machine, independent of control groups.
const STALLS: &str = "/proc/pressure/memory";
/// Mount point of the unified cgroup hierarchy (v2).
pub const UNIFIED: &str = "/sys/fs/cgroup";
/// Root memory cgroup of the cgroup v1 hierarchy.
const ROOT_GROUP: &str = "/sys/fs/cgroup/memory";
/// Minimum interval between registrations of a usage threshold: a crossing is observed by polling anyway.
const REDRAW: Duration = Duration::from_secs(1);
/// Minimum distance, in bytes, of a new usage threshold from the registered one: it moves with the page cache.
const SLACK: u64 = 16 << 20;

/// Notifier of the watcher: an observation may have changed.
#[derive(Default)]
pub struct ThresholdNotifier(Notify);

impl ThresholdNotifier {
    /// Notifies the watcher; notifications coalesce.
    pub fn notify(&self) {
        self.0.notify_one();
    }
}

#[async_trait]
impl ThresholdNotifications for ThresholdNotifier {
    async fn notified(&self) {
        self.0.notified().await;
    }
}

/// Notifies `notifier` when tasks stall on memory, if the kernel supports PSI.
pub async fn watch_psi(notifier: Arc<ThresholdNotifier>, stop: CancellationToken) {
    let stalls = match PressureTrigger::of(Path::new(STALLS)) {
        Ok(stalls) => stalls,
        Err(err) => return debug!(file = STALLS, %err, "Memory pressure stall (PSI) notifications are not available"),
    };
    loop {
        let notification = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            notification = stalls.next() => notification,
        };
        match notification {
            Ok(()) => notifier.notify(),
            Err(err) => return debug!(file = STALLS, %err, "Memory pressure stall (PSI) notifications stopped"),
        }
    }
}

/// Notifies `notifier` when the cgroup of all pods reaches its memory limit, if it is in the unified hierarchy.
pub async fn watch_memory_events(group: String, notifier: Arc<ThresholdNotifier>, stop: CancellationToken) {
    let directory: PathBuf = Path::new(UNIFIED).join(group.trim_start_matches('/'));
    let mut events = match CgroupMemoryEvents::of(&directory) {
        Ok(events) => events,
        Err(err) => return debug!(group, %err, "Memory limit notifications of the pods' cgroup are not available"),
    };
    loop {
        let notification = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            notification = events.next() => notification,
        };
        match notification {
            Ok(()) => notifier.notify(),
            Err(err) => return debug!(group, %err, "Memory limit notifications of the pods' cgroup stopped"),
        }
    }
}

/// Notifies `notifier` when memory usage crosses the latest threshold of `lines`, on cgroup v1.
pub async fn watch_memcg_usage(
    mut lines: watch::Receiver<Option<u64>>,
    notifier: Arc<ThresholdNotifier>,
    stop: CancellationToken,
) {
    let mut drawn: Option<(u64, UsageThreshold)> = None;
    loop {
        let wanted = *lines.borrow_and_update();
        if let Some(bytes) = wanted.filter(|bytes| is_elsewhere(drawn.as_ref().map(|(at, _)| *at), *bytes)) {
            match UsageThreshold::set(Path::new(ROOT_GROUP), bytes) {
                Ok(line) => drawn = Some((bytes, line)),
                Err(err) => {
                    return debug!(group = ROOT_GROUP, %err, "Memory usage threshold notifications are not available");
                }
            }
        }
        let crossed = async {
            match &drawn {
                Some((_, line)) => line.next().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            notification = crossed => match notification {
                Ok(()) => notifier.notify(),
                Err(err) => return debug!(group = ROOT_GROUP, %err, "Memory usage threshold notifications stopped"),
            },
            changed = lines.changed() => if changed.is_err() { return },
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = sleep(REDRAW) => {}
        }
    }
}

/// Returns whether a usage threshold has to be registered again.
fn is_elsewhere(drawn: Option<u64>, wanted: u64) -> bool {
    drawn.is_none_or(|drawn| drawn.abs_diff(wanted) > SLACK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_drawn_again_where_it_moved() {
        for (drawn, wanted, expected) in
            [(None, 0, true), (Some(0), SLACK, false), (Some(SLACK + 1), 0, true), (Some(5), 5, false)]
        {
            assert_eq!(is_elsewhere(drawn, wanted), expected, "{drawn:?} {wanted}");
        }
    }

    #[tokio::test]
    async fn repeated_notifications_coalesce_into_one() {
        let notifier = ThresholdNotifier::default();
        notifier.notify();
        notifier.notify();
        notifier.notified().await;
        let again = tokio::time::timeout(Duration::from_millis(1), notifier.notified()).await;
        assert!(again.is_err());
    }
}
