//! Rate-limited notifications: pods to resync because an object they use has changed.
//!
//! Pods of one change are spread, all within a second (spec 10a §19). The pending pods are a set, not a queue: repeated
//! notifications of one pod coalesce.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

use berth_types::PodUid;

/// Time over which the pods of one change are spread.
const SPREAD: Duration = Duration::from_millis(800);
/// Maximum gap between two pods.
const GAP: Duration = Duration::from_millis(20);

/// Sending half of the notifications.
#[derive(Clone, Debug, Default)]
pub struct ChangeNotifier(Arc<PendingChanges>);

#[derive(Debug, Default)]
struct PendingChanges {
    pods: Mutex<BTreeSet<PodUid>>,
    more: Notify,
}

impl ChangeNotifier {
    /// Schedules a resync of these pods.
    pub fn notify(&self, pods: impl IntoIterator<Item = PodUid>) {
        self.0.pods.lock().unwrap_or_else(PoisonError::into_inner).extend(pods);
        self.0.more.notify_one();
    }

    /// Returns the receiving half; there must be only one.
    pub fn subscribe(&self) -> ChangedPods {
        ChangedPods { shared: self.0.clone(), due: VecDeque::new() }
    }
}

/// Receiving half of the notifications.
#[derive(Debug)]
pub struct ChangedPods {
    shared: Arc<PendingChanges>,
    /// In the order of their times.
    due: VecDeque<(Instant, PodUid)>,
}

impl ChangedPods {
    /// Returns the next pod when its time has come. Cancel-safe.
    pub async fn next(&mut self) -> PodUid {
        loop {
            self.take_in();
            let due = self.due.front().map(|(at, _)| *at);
            match due {
                Some(at) if at <= Instant::now() => {
                    if let Some((_, pod)) = self.due.pop_front() {
                        return pod;
                    }
                }
                Some(at) => tokio::select! {
                    () = sleep_until(at) => {}
                    () = self.shared.more.notified() => {}
                },
                None => self.shared.more.notified().await,
            }
        }
    }

    fn take_in(&mut self) {
        let changed = std::mem::take(&mut *self.shared.pods.lock().unwrap_or_else(PoisonError::into_inner));
        let waiting: BTreeSet<&PodUid> = self.due.iter().map(|(_, pod)| pod).collect();
        let new: Vec<PodUid> = changed.into_iter().filter(|pod| !waiting.contains(pod)).collect();
        let gap = SPREAD.checked_div(u32::try_from(new.len()).unwrap_or(u32::MAX)).unwrap_or(GAP).min(GAP);
        let mut at = self.due.back().map_or_else(Instant::now, |(last, _)| *last + gap);
        for pod in new {
            self.due.push_back((at, pod));
            at += gap;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn pods_are_notified_once_within_a_second() {
        // AC-10a-36
        let notifier = ChangeNotifier::default();
        let mut changed = notifier.subscribe();
        let pods = |range: std::ops::Range<u32>| range.map(|n| PodUid::from(format!("{n:02}")));
        notifier.notify(pods(0..50));
        notifier.notify(pods(10..20));
        let began = Instant::now();
        assert_eq!(changed.next().await.as_str(), "00");
        assert_eq!(began.elapsed(), Duration::ZERO, "the first at once");
        notifier.notify(pods(40..60));
        let mut seen = BTreeSet::new();
        for _ in 1..60 {
            seen.insert(changed.next().await);
        }
        assert_eq!(seen.len(), 59, "each once");
        assert!(began.elapsed() > SPREAD && began.elapsed() < Duration::from_millis(1100), "{:?}", began.elapsed());
        assert!(tokio::time::timeout(Duration::from_secs(60), changed.next()).await.is_err(), "no more");
        notifier.notify(pods(3..4));
        assert_eq!(changed.next().await.as_str(), "03");
    }
}
