//! Mux: merges the full pod sets of all sources into one stream of operations.
//!
//!   file ─┐
//!   http ─┼─► sets (1 slot) ─► mux ─► operations (50 slots) ─► sync loop
//!   api  ─┘
//!
//! One task owns the last set of every source. A slow reader applies backpressure to the sources; a
//! source that hangs blocks no other. Implements spec 02a §2.

use std::{collections::BTreeMap, sync::Arc};

use jiff::{Timestamp, fmt::strtime, tz::TimeZone};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{diff::SourceStore, ports::SourceEvents};
use berth_metrics::SourceMetrics;
use berth_types::{Operation, Pod, PodChange, PodSource};

/// Capacity of the channel of operations to the sync loop.
pub const CHANGES_CAPACITY: usize = 50;

/// Returns the current wall time.
pub type WallClock = Arc<dyn Fn() -> Timestamp + Send + Sync>;

/// A full set of one source.
#[derive(Debug)]
pub struct SourceSet {
    /// Source whose earlier set this one replaces.
    pub source: PodSource,
    /// All its current pods.
    pub pods: Vec<Arc<Pod>>,
}

/// Sender of a source's sets to the mux.
#[derive(Clone, Debug)]
pub struct SourceSender {
    source: PodSource,
    sets: mpsc::Sender<SourceSet>,
}

impl SourceSender {
    /// Creates the sender of one source.
    pub fn new(source: PodSource, sets: mpsc::Sender<SourceSet>) -> Self {
        Self { source, sets }
    }

    /// Sends a full set; waits while the mux is busy. If the mux has ended the set is dropped: the
    /// agent is stopping then.
    pub async fn send(&self, pods: Vec<Arc<Pod>>) {
        let _ = self.sets.send(SourceSet { source: self.source, pods }).await;
    }
}

/// Inputs and dependencies of the mux.
pub struct Mux {
    /// Receiver of sets.
    pub sets: mpsc::Receiver<SourceSet>,
    /// Sender of operations.
    pub changes: mpsc::Sender<PodChange>,
    /// Receiver of events and observed pods.
    pub events: Arc<dyn SourceEvents>,
    /// Metrics of the sources.
    pub metrics: SourceMetrics,
    /// Returns the current wall time.
    pub now: WallClock,
}

impl Mux {
    /// Runs until cancelled, until no source is left, or until the receiver of operations is gone.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut stores: BTreeMap<PodSource, SourceStore> = BTreeMap::new();
        loop {
            let set = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                set = self.sets.recv() => match set {
                    Some(set) => set,
                    None => return,
                },
            };
            let source = set.source;
            let store = stores.entry(source).or_insert_with(|| SourceStore::new(source));
            for change in self.merge(store, set) {
                tokio::select! {
                    biased;
                    () = stop.cancelled() => return,
                    sent = self.changes.send(change) => if sent.is_err() { return },
                }
            }
        }
    }

    fn merge(&self, store: &mut SourceStore, set: SourceSet) -> Vec<PodChange> {
        let source = set.source.as_str();
        let count = i64::try_from(set.pods.len()).unwrap_or(i64::MAX);
        self.metrics.pods.with_label_values(&[source]).set(count);
        let merged = store.merge(set.pods, &seen((self.now)()));
        for duplicate in merged.duplicates {
            warn!(pod = %duplicate.pod, source, "Ignoring pod with duplicate name");
            self.metrics.duplicates.with_label_values(&[source]).inc();
            self.events.warning(&duplicate.pod, "FailedValidation", duplicate.message);
        }
        let present = merged.changes.iter().filter(|change| change.operation != Operation::Remove);
        for pod in present.flat_map(|change| &change.pods) {
            if !pod.is_static() {
                self.events.observed(pod);
            }
        }
        merged.changes
    }
}

/// The value of `kubernetes.io/config.seen`: local time with nine digits, `Z` for UTC.
fn seen(now: Timestamp) -> String {
    let local = now.to_zoned(TimeZone::system());
    let zone = if local.offset().seconds() == 0 { "Z" } else { "%:z" };
    strtime::format(format!("%Y-%m-%dT%H:%M:%S.%9f{zone}"), &local).unwrap_or_else(|_| now.to_string())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use berth_metrics::Registry;
    use berth_types::PodRef;

    #[derive(Default)]
    struct FakeEvents(Mutex<Vec<String>>);

    impl SourceEvents for FakeEvents {
        fn warning(&self, pod: &PodRef, reason: &'static str, message: String) {
            self.0.lock().expect("not poisoned").push(format!("{pod} {reason} {message}"));
        }

        fn observed(&self, pod: &Arc<berth_types::Pod>) {
            self.0.lock().expect("not poisoned").push(format!("observed {}", pod.name()));
        }
    }

    fn pod(name: &str, uid: &str) -> Arc<Pod> {
        let json =
            serde_json::json!({"metadata": {"name": name, "namespace": "n", "uid": uid}, "spec": {"containers": []}});
        Arc::new(serde_json::from_value(json).expect("a pod"))
    }

    struct Bench {
        events: Arc<FakeEvents>,
        metrics: SourceMetrics,
        sets: mpsc::Sender<SourceSet>,
        changes: mpsc::Receiver<PodChange>,
        stop: CancellationToken,
        task: tokio::task::JoinHandle<()>,
    }

    fn bench() -> Bench {
        let (sets, from_sources) = mpsc::channel(1);
        let (to_engine, changes) = mpsc::channel(CHANGES_CAPACITY);
        let (events, metrics) = (Arc::new(FakeEvents::default()), SourceMetrics::new(&Registry::new()));
        let mux = Mux {
            sets: from_sources,
            changes: to_engine,
            events: events.clone(),
            metrics: metrics.clone(),
            now: Arc::new(|| Timestamp::UNIX_EPOCH),
        };
        let stop = CancellationToken::new();
        let task = tokio::spawn(mux.run(stop.clone()));
        Bench { events, metrics, sets, changes, stop, task }
    }

    #[tokio::test]
    async fn sources_are_merged_apart_and_each_answers_first() {
        let mut bench = bench();
        for (source, pods) in [
            (PodSource::File, vec![pod("a", "1")]),
            (PodSource::Http, Vec::new()),
            (PodSource::Api, vec![pod("a", "1"), pod("b", "2")]),
        ] {
            SourceSender::new(source, bench.sets.clone()).send(pods).await;
        }
        for (source, count) in [(PodSource::File, 1), (PodSource::Http, 0), (PodSource::Api, 2)] {
            let change = bench.changes.recv().await.expect("a change");
            assert_eq!((change.operation, change.source, change.pods.len()), (Operation::Add, source, count));
        }
        assert_eq!(*bench.events.0.lock().expect("not poisoned"), ["observed a", "observed b"]);
        bench.stop.cancel();
        bench.task.await.expect("no panic");
    }

    #[tokio::test]
    async fn duplicates_are_events_and_counted() {
        let mut bench = bench();
        SourceSender::new(PodSource::File, bench.sets.clone()).send(vec![pod("a", "1"), pod("a", "2")]).await;
        bench.changes.recv().await.expect("a change");
        assert_eq!(
            *bench.events.0.lock().expect("not poisoned"),
            ["a_n(2) FailedValidation Error validating pod a_n(2) from file due to duplicate pod name \"a\", ignoring"]
        );
        assert_eq!(bench.metrics.duplicates.with_label_values(&["file"]).get(), 1);
        assert_eq!(bench.metrics.pods.with_label_values(&["file"]).get(), 2);
    }

    #[tokio::test]
    async fn the_mux_ends_with_its_sources_and_with_its_reader() {
        let Bench { sets, changes, task, .. } = bench();
        drop(sets);
        task.await.expect("no panic");
        drop(changes);
        let Bench { sets, changes, task, .. } = bench();
        drop(changes);
        SourceSender::new(PodSource::File, sets).send(Vec::new()).await;
        task.await.expect("no panic");
    }

    #[test]
    fn the_time_of_first_sight_has_nine_digits() {
        let text = seen(Timestamp::new(1_767_323_045, 60).expect("a time"));
        assert!(text.starts_with("2026-01-0") && text.contains(".000000060"), "{text}");
        assert!(text.parse::<Timestamp>().is_ok(), "{text}");
    }
}
