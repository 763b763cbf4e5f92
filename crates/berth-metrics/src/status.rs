//! Metrics of pod status and pod startup. Implements spec 08 §4.5-4.6.

use prometheus::{Gauge, Histogram, HistogramVec, IntCounterVec};

use super::{Registry, Stability, buckets};

/// Metric handles of the status manager.
#[derive(Clone, Debug)]
pub struct StatusMetrics {
    terminated_containers: IntCounterVec,
    /// Seconds from the first unsent change of a status until it was written, truncated to milliseconds.
    pub status_sync: Histogram,
    start_total: HistogramVec,
    start_sli: HistogramVec,
    first_network_start: Gauge,
}

impl StatusMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        Self {
            terminated_containers: registry.counters(
                Stability::Alpha,
                "kubelet_terminated_containers_total",
                "Containers that were seen to end",
                &["container_type", "exit_code", "reason"],
            ),
            status_sync: registry.histogram(
                Stability::Alpha,
                "kubelet_pod_status_sync_duration_seconds",
                "Seconds from the first unsent change of a pod's status until it was written",
                buckets::STATUS,
            ),
            start_total: registry.histograms(
                Stability::Alpha,
                "kubelet_pod_start_total_duration_seconds",
                "Seconds from the creation of a pod until it was watched to run",
                buckets::PODSTART,
                &[],
            ),
            start_sli: registry.histograms(
                Stability::Alpha,
                "kubelet_pod_start_sli_duration_seconds",
                "Seconds to start a pod without state, less image pulls and init containers",
                buckets::PODSTART,
                &[],
            ),
            first_network_start: registry.float_gauge(
                Stability::Internal,
                "kubelet_first_network_pod_start_sli_duration_seconds",
                "Seconds to start the first pod with a network of its own, less image pulls and init containers",
            ),
        }
    }

    /// Counts a terminated container.
    pub fn container_ended(&self, container_type: &str, exit_code: i32, reason: &str) {
        self.terminated_containers.with_label_values(&[container_type, &exit_code.to_string(), reason]).inc();
    }

    /// Records the startup time of a pod in seconds; `sli` is `None` for stateful pods.
    pub fn pod_started(&self, total: f64, sli: Option<f64>, first_network: bool) {
        const NO_LABELS: [&str; 0] = [];
        self.start_total.with_label_values(&NO_LABELS).observe(total);
        let Some(sli) = sli else { return };
        self.start_sli.with_label_values(&NO_LABELS).observe(sli);
        if first_network {
            self.first_network_start.set(sli);
        }
    }
}
