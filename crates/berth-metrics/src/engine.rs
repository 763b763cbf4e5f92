//! Metrics of pod workers, the pod manager, and orphaned pods (spec 08 §4.2).

use std::time::Duration;

use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};

use super::{Registry, Stability::Alpha, buckets};

const COUNT5: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0];

/// Metric handles of the pod engine.
#[derive(Clone, Debug)]
pub struct EngineMetrics {
    worker_duration: HistogramVec,
    /// Seconds from the `kubernetes.io/config.seen` annotation to the worker's first sync.
    pub worker_start: Histogram,
    /// Seconds from the `kubernetes.io/config.seen` annotation to the first status that shows the pod running.
    pub pod_start: Histogram,
    /// Number of regular containers of each started pod.
    pub containers_per_pod: Histogram,
    /// Pods in the pod manager; label `static`.
    pub desired_pods: IntGaugeVec,
    /// Pods that count for admission; label `static`.
    pub active_pods: IntGaugeVec,
    /// Known mirror pods.
    pub mirror_pods: IntGauge,
    working_pods: IntGaugeVec,
    /// Pods recreated with the same UID; label `static`.
    pub restarted_pods: IntCounterVec,
    /// Pods in the runtime without a pod worker.
    pub orphaned_runtime_pods: IntCounter,
    /// Ephemeral containers of desired pods.
    pub ephemeral_containers: IntGauge,
}

/// Counts of `kubelet_working_pods` by lifecycle, configuration, and static.
pub type WorkingPods = std::collections::HashMap<(&'static str, &'static str, &'static str), i64>;

impl EngineMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let vec = |name, help, labels: &[&str]| registry.gauges(Alpha, name, help, labels);
        let made = Self {
            worker_duration: registry.histograms(
                Alpha,
                "kubelet_pod_worker_duration_seconds",
                "Duration in seconds from the update of a pod to the end of its sync, by operation type.",
                buckets::DEF,
                &["operation_type"],
            ),
            worker_start: registry.histogram(
                Alpha,
                "kubelet_pod_worker_start_duration_seconds",
                "Duration in seconds from first seeing a pod to the start of its worker.",
                buckets::DEF,
            ),
            pod_start: registry.histogram(
                Alpha,
                "kubelet_pod_start_duration_seconds",
                "Duration in seconds from first seeing a pod to the pod running.",
                buckets::PODSTART,
            ),
            containers_per_pod: registry.histogram(
                Alpha,
                "kubelet_containers_per_pod_count",
                "The number of containers per pod.",
                COUNT5,
            ),
            desired_pods: vec(
                "kubelet_desired_pods",
                "The number of pods that the sources desire on this node.",
                &["static"],
            ),
            active_pods: vec(
                "kubelet_active_pods",
                "The number of active pods, which admission takes into account.",
                &["static"],
            ),
            mirror_pods: registry.gauge(Alpha, "kubelet_mirror_pods", "The number of mirror pods known."),
            working_pods: vec(
                "kubelet_working_pods",
                "Number of pod workers by lifecycle phase, by whether the pod is desired, orphaned, or known to the runtime only, and by static.",
                &["lifecycle", "config", "static"],
            ),
            restarted_pods: registry.counters(
                Alpha,
                "kubelet_restarted_pods_total",
                "Number of pods that were deleted and recreated with the same UID.",
                &["static"],
            ),
            orphaned_runtime_pods: registry.counter(
                Alpha,
                "kubelet_orphaned_runtime_pods_total",
                "Number of pods found in the container runtime without a pod worker.",
            ),
            ephemeral_containers: registry.gauge(
                Alpha,
                "kubelet_managed_ephemeral_containers",
                "Current number of ephemeral containers in pods of this node.",
            ),
        };
        made.set_working(&WorkingPods::new());
        for is_static in [false, true] {
            let _zero = made.restarted_pods.with_label_values(&[static_label(is_static)]);
        }
        made
    }

    /// Records a finished worker sync, with the time since its update was handed to the worker.
    pub fn worker_duration(&self, operation: &str, taken: Duration) {
        self.worker_duration.with_label_values(&[operation]).observe(taken.as_secs_f64());
    }

    /// Sets all fifteen series of `kubelet_working_pods`.
    pub fn set_working(&self, counts: &WorkingPods) {
        for lifecycle in ["sync", "terminating", "terminated"] {
            let desired = ["desired", "orphan"].into_iter().flat_map(|config| [(config, ""), (config, "true")]);
            for (config, is_static) in desired.chain([("runtime_only", "unknown")]) {
                let count = counts.get(&(lifecycle, config, is_static)).copied().unwrap_or(0);
                self.working_pods.with_label_values(&[lifecycle, config, is_static]).set(count);
            }
        }
    }
}

/// Value of the `static` label: empty or `true`.
pub fn static_label(is_static: bool) -> &'static str {
    if is_static { "true" } else { "" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_fifteen_series_of_working_pods_always_exist() {
        let registry = Registry::new();
        let metrics = EngineMetrics::new(&registry);
        metrics.set_working(&[(("sync", "desired", "true"), 3)].into());
        let families = registry.gather();
        let restarted = families.iter().find(|f| f.name() == "kubelet_restarted_pods_total").expect("registered");
        assert_eq!(restarted.get_metric().len(), 2);
        let family = families.iter().find(|f| f.name() == "kubelet_working_pods").expect("registered");
        assert_eq!(family.get_metric().len(), 15);
        assert_eq!(family.get_metric().iter().map(|m| m.get_gauge().get_value()).sum::<f64>(), 3.0);
    }
}
