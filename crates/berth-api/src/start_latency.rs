//! Pod startup latency metrics, from the watch, status writes, and image pull events.
//!
//! Measures pods of the API server without extra instrumentation; [`berth_status::latency`] computes the durations.
//!
//! Implements spec 02b §9.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio_util::sync::CancellationToken;
use tracing::info;

use super::{ReflectorStore, Snapshot};
use berth_metrics::StatusMetrics;
use berth_ports::{Clock, EventRecord, EventSink, EventTarget};
use berth_status::{
    latency::{StartLatency, StartSample},
    lookup::{exit, last_exit},
};
use berth_types::{Pod, PodUid, api};

/// Recorder of startup latencies; see the module's documentation.
pub struct StartTimes {
    state: Mutex<StartLatency>,
    metrics: StatusMetrics,
    clock: Arc<dyn Clock>,
}

impl StartTimes {
    /// Returns a recorder without observations.
    pub fn new(metrics: StatusMetrics, clock: Arc<dyn Clock>) -> Self {
        Self { state: Mutex::default(), metrics, clock }
    }

    /// Records a status that was written to the API server.
    pub fn written(&self, uid: &PodUid, status: &api::PodStatus) {
        let sample = {
            let mut state = self.lock();
            for container in status.init_container_statuses.iter().flatten() {
                // A failed run may be reported only after the next one has started.
                for end in [last_exit(container), exit(container)].into_iter().flatten() {
                    let (Some(began), Some(ended)) = (&end.started_at, &end.finished_at) else { continue };
                    state.init_ran(uid, &container.name, began.0, ended.0);
                }
            }
            state.status_written(uid, status, self.clock.now())
        };
        // The watch may have shown the pod running before the response to the write arrived.
        if let Some(sample) = sample {
            self.observe(&sample);
        }
    }

    /// Observes the watch until stopped.
    pub async fn run(&self, mut pods: ReflectorStore<Pod>, stop: CancellationToken) {
        let mut before = Arc::<Snapshot<Pod>>::default();
        loop {
            let shown = pods.snapshot();
            self.process_changes(&before.objects, &shown.objects);
            before = shown;
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = pods.changed() => {}
            }
        }
    }

    fn process_changes(&self, before: &Objects, shown: &Objects) {
        for (name, object) in shown {
            let known = before.get(name);
            if known.is_some_and(|known| Arc::ptr_eq(known, object)) {
                continue;
            }
            if let Some(known) = known.filter(|known| known.metadata.uid != object.metadata.uid) {
                self.gone(known);
            }
            self.shown(object);
        }
        before.iter().filter(|(name, _)| !shown.contains_key(*name)).for_each(|(_, object)| self.gone(object));
    }

    fn shown(&self, pod: &Pod) {
        if self.lock().is_settled(pod.uid()) || pod.is_mirror() {
            return;
        }
        let sample = self.lock().handle_watch_event(pod, self.clock.now());
        if let Some(sample) = sample {
            self.observe(&sample);
        }
    }

    fn observe(&self, sample: &StartSample) {
        let (total, sli) = (sample.total.as_secs_f64(), sample.sli.as_secs_f64());
        info!(
            pod = %sample.pod, podStartSLOduration = sli, podStartE2EDuration = total,
            pulling = ?sample.pulling, initRuntime = ?sample.init, "Observed pod startup duration"
        );
        self.metrics.pod_started(total, (!sample.stateful).then_some(sli), sample.first_network);
    }

    fn gone(&self, object: &Pod) {
        self.lock().deleted(&PodUid::from(object.metadata.uid.as_deref().unwrap_or_default()));
    }

    fn lock(&self) -> MutexGuard<'_, StartLatency> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

type Objects = BTreeMap<(String, String), Arc<Pod>>;

/// Event sink that records image pull times and forwards every event.
pub struct TimedEvents {
    /// Recorder of the pull times.
    pub times: Arc<StartTimes>,
    /// Sink that receives every event.
    pub next: Arc<dyn EventSink>,
}

impl EventSink for TimedEvents {
    fn record(&self, event: EventRecord) {
        if let EventTarget::Pod { pod, .. } = &event.target {
            let now = self.times.clock.now();
            match (&*event.reason, event.message.as_str()) {
                ("Pulling", _) => self.times.lock().pull_started(&pod.uid, now),
                // An image that was already present was not pulled; a failed pull has ended too.
                ("Pulled", text) if text.starts_with("Successfully pulled") => {
                    self.times.lock().pull_finished(&pod.uid, now);
                }
                ("Failed", text) if text.starts_with("Failed to pull") => {
                    self.times.lock().pull_finished(&pod.uid, now);
                }
                _ => {}
            }
        }
        self.next.record(event);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, Ordering};

    use jiff::Timestamp;
    use serde_json::{Value, json};
    use tokio::sync::watch;

    use super::*;
    use berth_metrics::Registry;
    use berth_types::PodRef;

    #[derive(Default)]
    struct ManualClock(AtomicI64);

    impl Clock for ManualClock {
        fn now(&self) -> Timestamp {
            Timestamp::from_second(self.0.load(Ordering::Relaxed)).expect("a small number")
        }
    }

    struct Nowhere;

    impl EventSink for Nowhere {
        fn record(&self, _event: EventRecord) {}
    }

    fn status(running: bool) -> Value {
        let time = |second: i64| Timestamp::from_second(second).expect("a small number").to_string();
        let container = |name: &str, state: Value| json!({"name": name, "image": "", "imageID": "", "ready": true, "restartCount": 0, "state": state});
        let ran = json!({"terminated": {"exitCode": 0, "startedAt": time(104), "finishedAt": time(106)}});
        let state = if running { json!({"running": {"startedAt": time(108)}}) } else { json!({"waiting": {}}) };
        json!({"initContainerStatuses": [container("i", ran)], "containerStatuses": [container("c", state)]})
    }

    fn shown(status: Value) -> Arc<Snapshot<Pod>> {
        let created = Timestamp::from_second(100).expect("a small number").to_string();
        let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u", "creationTimestamp": created},
            "spec": {"containers": [{"name": "c"}]}, "status": status});
        let pod = Arc::new(serde_json::from_value(pod).expect("a pod"));
        let objects = [(("n".to_owned(), "p".to_owned()), pod)].into();
        Arc::new(Snapshot { synced: true, version: "1".into(), objects })
    }

    /// Pod starts under a clock that the test sets, and the resulting metrics.
    struct Bench {
        registry: Registry,
        clock: Arc<ManualClock>,
        times: Arc<StartTimes>,
        events: TimedEvents,
        store: watch::Sender<Arc<Snapshot<Pod>>>,
        stop: CancellationToken,
        task: tokio::task::JoinHandle<()>,
    }

    impl Bench {
        /// The watch shows a pod that was just bound, at second 101.
        async fn new() -> Self {
            let (registry, clock) = (Registry::new(), Arc::new(ManualClock::default()));
            let times = Arc::new(StartTimes::new(StatusMetrics::new(&registry), clock.clone()));
            let events = TimedEvents { times: times.clone(), next: Arc::new(Nowhere) };
            let (store, receiver) = watch::channel(Arc::default());
            let stop = CancellationToken::new();
            let (follower, pods, stopped) = (times.clone(), ReflectorStore::new(receiver), stop.clone());
            let task = tokio::spawn(async move { follower.run(pods, stopped).await });
            let bench = Self { registry, clock, times, events, store, stop, task };
            bench.show(101, json!({})).await;
            bench
        }

        fn at(&self, second: i64) {
            self.clock.0.store(second, Ordering::Relaxed);
        }

        async fn show(&self, second: i64, status: Value) {
            self.at(second);
            self.store.send_replace(shown(status));
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
        }

        fn write(&self, second: i64, status: Value) {
            self.at(second);
            let status = serde_json::from_value::<api::PodStatus>(status).expect("a status");
            self.times.written(&"u".into(), &status);
        }

        /// Count and sum of the total and SLI histograms.
        fn measured(&self) -> [(u64, f64); 2] {
            ["kubelet_pod_start_total_duration_seconds", "kubelet_pod_start_sli_duration_seconds"].map(|name| {
                let families = self.registry.gather();
                let family = families.iter().find(|f| f.name() == name).expect("there");
                let histogram = family.get_metric()[0].get_histogram();
                (histogram.get_sample_count(), histogram.get_sample_sum())
            })
        }

        async fn end(self) {
            self.stop.cancel();
            self.task.await.expect("it ends");
        }
    }

    #[tokio::test]
    async fn a_start_is_measured_once() {
        let bench = Bench::new().await;
        let pod = PodRef { uid: "u".into(), name: "p".into(), namespace: "n".into() };
        for (second, reason, text) in [
            (101, "Pulling", "Pulling image \"a\""),
            (102, "Pulled", "Container image \"b\" already present on machine"),
            (103, "Pulled", "Successfully pulled image \"a\""),
        ] {
            bench.at(second);
            bench.events.record(EventRecord::normal(&pod, reason, text));
        }
        bench.write(107, status(false));
        bench.write(109, status(true));
        bench.show(110, status(true)).await;
        bench.show(111, status(true)).await;
        assert_eq!(bench.measured(), [(1, 10.0), (1, 6.0)], "less 2 s of pull and 2 s of init");
        bench.end().await;
    }

    #[tokio::test]
    async fn a_start_that_the_watch_shows_before_the_write_is_answered_is_measured() {
        let bench = Bench::new().await;
        bench.write(107, status(false));
        bench.show(110, status(true)).await;
        bench.write(111, status(true));
        bench.write(112, status(true));
        assert_eq!(bench.measured(), [(1, 10.0), (1, 8.0)], "less 2 s of init");
        bench.end().await;
    }

    #[tokio::test]
    async fn each_run_of_an_init_container_counts() {
        let bench = Bench::new().await;
        let mut reported = status(true);
        let time = |second: i64| Timestamp::from_second(second).expect("a small number").to_string();
        reported["initContainerStatuses"][0]["lastState"] =
            json!({"terminated": {"exitCode": 1, "startedAt": time(102), "finishedAt": time(103)}});
        bench.write(109, reported);
        bench.show(110, status(true)).await;
        assert_eq!(bench.measured(), [(1, 10.0), (1, 7.0)], "less 1 s and 2 s of init");
        bench.end().await;
    }
}
