//! client-go work queue metrics, for the operations that use a work queue in kubelet.
//!
//! Implements spec 08 §4.16 of `docs/spec`.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use prometheus::{
    Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec,
    core::{Collector, Desc},
    proto::MetricFamily,
};

use super::{Registry, Stability, buckets};

/// The families, from which each queue takes a handle.
#[derive(Clone, Debug)]
pub struct WorkQueueMetrics {
    depth: IntGaugeVec,
    adds: IntCounterVec,
    retries: IntCounterVec,
    queued_seconds: HistogramVec,
    work_seconds: HistogramVec,
    running: StartTimes,
}

impl WorkQueueMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let (beta, labels) = (Stability::Beta, &["name"][..]);
        let running = StartTimes::default();
        registry.collector(RunningCollector::new(running.clone()));
        Self {
            depth: registry.gauges(beta, "workqueue_depth", "Current depth of workqueue", labels),
            adds: registry.counters(beta, "workqueue_adds_total", "Total number of adds handled by workqueue", labels),
            retries: registry.counters(
                beta,
                "workqueue_retries_total",
                "Total number of retries handled by workqueue",
                labels,
            ),
            queued_seconds: registry.histograms(
                beta,
                "workqueue_queue_duration_seconds",
                "How long in seconds an item stays in workqueue before being requested.",
                buckets::WORKQUEUE,
                labels,
            ),
            work_seconds: registry.histograms(
                beta,
                "workqueue_work_duration_seconds",
                "How long in seconds processing an item from workqueue takes.",
                buckets::WORKQUEUE,
                labels,
            ),
            running,
        }
    }

    /// Returns the handle of queue `name`; its series exist from now on.
    pub fn queue(&self, name: &str) -> WorkQueue {
        let started = Arc::new(Mutex::new(None));
        self.running.0.lock().unwrap_or_else(PoisonError::into_inner).push((name.to_owned(), started.clone()));
        WorkQueue {
            depth: self.depth.with_label_values(&[name]),
            adds: self.adds.with_label_values(&[name]),
            retries: self.retries.with_label_values(&[name]),
            queued_seconds: self.queued_seconds.with_label_values(&[name]),
            work_seconds: self.work_seconds.with_label_values(&[name]),
            started,
        }
    }
}

/// Handle of a queue with at most one item, which processes one item at a time.
#[derive(Clone, Debug)]
pub struct WorkQueue {
    depth: IntGauge,
    adds: IntCounter,
    retries: IntCounter,
    queued_seconds: Histogram,
    work_seconds: Histogram,
    started: Arc<Mutex<Option<Instant>>>,
}

impl WorkQueue {
    /// Records an added item.
    pub fn added(&self) {
        self.adds.inc();
        self.depth.inc();
    }

    /// Records that processing of the last added item starts, after it was queued for `queued`.
    pub fn started(&self, queued: Duration) {
        self.depth.dec();
        self.queued_seconds.observe(queued.as_secs_f64());
        *self.started.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Records the end of processing. A failed item counts as a retry, because it is processed again.
    pub fn finished(&self, is_failed: bool) {
        if let Some(started) = self.started.lock().unwrap_or_else(PoisonError::into_inner).take() {
            self.work_seconds.observe(started.elapsed().as_secs_f64());
        }
        if is_failed {
            self.retries.inc();
        }
    }
}

type StartTime = Arc<Mutex<Option<Instant>>>;

/// Start time of each queue's current item.
#[derive(Clone, Debug, Default)]
struct StartTimes(Arc<Mutex<Vec<(String, StartTime)>>>);

/// Computes at each scrape for how long the current items have been processed.
struct RunningCollector {
    running: StartTimes,
    unfinished: prometheus::GaugeVec,
    longest: prometheus::GaugeVec,
}

impl RunningCollector {
    fn new(running: StartTimes) -> Self {
        let registry = Registry::new();
        let beta = Stability::Beta;
        Self {
            running,
            unfinished: registry.float_gauges(
                beta,
                "workqueue_unfinished_work_seconds",
                "How many seconds of work has done that is in progress and hasn't been observed by work_duration. \
                 Large values indicate stuck threads. One can deduce the number of stuck threads by observing the \
                 rate at which this increases.",
                &["name"],
            ),
            longest: registry.float_gauges(
                beta,
                "workqueue_longest_running_processor_seconds",
                "How many seconds has the longest running processor for workqueue been running.",
                &["name"],
            ),
        }
    }
}

impl Collector for RunningCollector {
    fn desc(&self) -> Vec<&Desc> {
        self.unfinished.desc().into_iter().chain(self.longest.desc()).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        for (name, started) in self.running.0.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let started = *started.lock().unwrap_or_else(PoisonError::into_inner);
            let seconds = started.map_or(0.0, |started| started.elapsed().as_secs_f64());
            // One item at a time: the sum and the maximum are the same.
            self.unfinished.with_label_values(&[name.as_str()]).set(seconds);
            self.longest.with_label_values(&[name.as_str()]).set(seconds);
        }
        self.unfinished.collect().into_iter().chain(self.longest.collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(registry: &Registry, family: &str) -> f64 {
        let families = registry.gather();
        let found = families.iter().find(|f| f.name() == family).unwrap_or_else(|| panic!("{family} is not there"));
        let metric = &found.get_metric()[0];
        assert_eq!(metric.get_label()[0].value(), "q");
        match found.get_field_type() {
            prometheus::proto::MetricType::COUNTER => metric.get_counter().get_value(),
            prometheus::proto::MetricType::HISTOGRAM => metric.get_histogram().get_sample_count() as f64,
            _ => metric.get_gauge().get_value(),
        }
    }

    #[test]
    fn an_item_moves_through_its_queue() {
        let registry = Registry::new();
        let queue = WorkQueueMetrics::new(&registry).queue("q");
        let all = |expected: [f64; 5]| {
            let names = ["depth", "adds_total", "retries_total", "queue_duration_seconds", "work_duration_seconds"];
            assert_eq!(names.map(|name| value(&registry, &format!("workqueue_{name}"))), expected);
        };
        all([0.0, 0.0, 0.0, 0.0, 0.0]);
        queue.added();
        all([1.0, 1.0, 0.0, 0.0, 0.0]);
        assert_eq!(value(&registry, "workqueue_unfinished_work_seconds"), 0.0);
        queue.started(Duration::from_millis(3));
        all([0.0, 1.0, 0.0, 1.0, 0.0]);
        assert!(value(&registry, "workqueue_unfinished_work_seconds") > 0.0);
        assert!(value(&registry, "workqueue_longest_running_processor_seconds") > 0.0);
        queue.finished(true);
        all([0.0, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(value(&registry, "workqueue_longest_running_processor_seconds"), 0.0);
    }
}
