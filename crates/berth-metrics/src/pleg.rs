//! Metrics of the pod lifecycle event generator (PLEG). Implements spec 08 §4.2-4.3.

use prometheus::{Gauge, Histogram, IntCounter, IntGauge};

use super::{Registry, Stability::Alpha, buckets::DEF};

/// Metric handles of PLEG.
#[derive(Clone, Debug)]
pub struct PlegMetrics {
    /// `kubelet_pleg_relist_duration_seconds`: every complete relist, failed ones included.
    pub relist_duration: Histogram,
    /// `kubelet_pleg_relist_interval_seconds`: from the start of a successful relist to that of the next.
    pub relist_interval: Histogram,
    /// `kubelet_pleg_pod_relist_duration_seconds`: relists of one pod.
    pub pod_relist_duration: Histogram,
    /// `kubelet_pleg_last_seen_seconds`: Unix time of the last successful relist.
    pub last_seen: Gauge,
    /// `kubelet_pleg_discard_events`: events of dead containers dropped because their channel was full.
    pub discarded: IntCounter,
    /// `kubelet_evented_pleg_connection_success_count`: opened event streams.
    pub stream_opened: IntCounter,
    /// `kubelet_evented_pleg_connection_error_count`: event streams that failed or ended.
    pub stream_errors: IntCounter,
    /// `kubelet_evented_pleg_connection_latency_seconds`: age of an event on arrival.
    pub stream_latency: Histogram,
    /// `kubelet_running_pods`: pods with at least one ready sandbox.
    pub running_pods: IntGauge,
    /// `kubelet_running_containers`, by state: created, running, exited, unknown.
    pub running_containers: [IntGauge; 4],
}

impl PlegMetrics {
    /// Registers the families; all series exist from the beginning.
    pub fn new(registry: &Registry) -> Self {
        let seconds = |name, help| registry.histogram(Alpha, name, help, DEF);
        let containers = registry.gauges(
            Alpha,
            "kubelet_running_containers",
            "Number of containers currently running",
            &["container_state"],
        );
        Self {
            relist_duration: seconds(
                "kubelet_pleg_relist_duration_seconds",
                "Duration in seconds for relisting pods in PLEG.",
            ),
            relist_interval: seconds(
                "kubelet_pleg_relist_interval_seconds",
                "Interval in seconds between relisting in PLEG.",
            ),
            pod_relist_duration: seconds(
                "kubelet_pleg_pod_relist_duration_seconds",
                "Duration in seconds for relisting a single pod in PLEG.",
            ),
            last_seen: registry.float_gauge(
                Alpha,
                "kubelet_pleg_last_seen_seconds",
                "Timestamp in seconds when PLEG was last seen active.",
            ),
            discarded: registry.counter(Alpha, "kubelet_pleg_discard_events", "The number of discard events in PLEG."),
            stream_opened: registry.counter(
                Alpha,
                "kubelet_evented_pleg_connection_success_count",
                "The number of times a streaming client was obtained to receive CRI Events.",
            ),
            stream_errors: registry.counter(
                Alpha,
                "kubelet_evented_pleg_connection_error_count",
                "The number of errors encountered during the establishment of streaming connection with the CRI runtime.",
            ),
            stream_latency: seconds(
                "kubelet_evented_pleg_connection_latency_seconds",
                "The latency of streaming connection with the CRI runtime, measured in seconds.",
            ),
            running_pods: registry.gauge(
                Alpha,
                "kubelet_running_pods",
                "Number of pods that have a running pod sandbox",
            ),
            running_containers: ["created", "running", "exited", "unknown"]
                .map(|state| containers.with_label_values(&[state])),
        }
    }
}
