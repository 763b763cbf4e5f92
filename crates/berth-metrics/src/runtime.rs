//! Metrics of pod and container starts, lifecycle hooks, and in-place resizes.
//!
//! Implements spec 08 §4.4, §4.6, §4.11.

use prometheus::{HistogramVec, IntCounter, IntCounterVec};

use super::{Registry, Stability, buckets};

/// Metric handles of the runtime manager.
#[derive(Clone, Debug)]
pub struct RuntimeMetrics {
    /// Duration of `RunPodSandbox`, seconds; label `runtime_handler`.
    pub run_sandbox: HistogramVec,
    /// Failed `RunPodSandbox` calls; label `runtime_handler`.
    pub run_sandbox_errors: IntCounterVec,
    /// Attempted sandbox creations.
    pub started_pods: IntCounter,
    /// Failed sandbox creations.
    pub started_pods_errors: IntCounter,
    /// Attempted sandbox creations of pods with a user namespace.
    pub started_userns_pods: IntCounter,
    /// Syncs that started a pod with a user namespace and had any error.
    pub started_userns_pods_errors: IntCounter,
    /// Attempted container starts; label `container_type`.
    pub started_containers: IntCounterVec,
    /// Failed container starts; labels `container_type`, `code`.
    pub started_containers_errors: IntCounterVec,
    /// Image volumes of attempted container creations.
    pub image_volumes_requested: IntCounter,
    /// Image volumes of successful container creations.
    pub image_volumes_mounted: IntCounter,
    /// Image volumes of container creations that failed because of an image volume.
    pub image_volumes_failed: IntCounter,
    /// Sleep hooks cut short by the grace period.
    pub sleep_cut: IntCounter,
    /// Hooks that succeeded after a fallback from HTTPS to HTTP.
    pub http_fallbacks: IntCounter,
    /// Duration of in-place resizes, milliseconds; label `success`.
    pub resize: HistogramVec,
}

/// Buckets `RESIZE` of spec 08 §3, milliseconds.
const RESIZE: &[f64] = &[10.0, 50.0, 100.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 3e4, 6e4, 1.2e5, 3e5, 6e5];

impl RuntimeMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let counter = |name, help| registry.counter(Stability::Alpha, name, help);
        let counters = |name, help, labels: &[&str]| registry.counters(Stability::Alpha, name, help, labels);
        let histograms =
            |name, help, bounds, label| registry.histograms(Stability::Alpha, name, help, bounds, &[label]);
        counters(
            "kubelet_started_host_process_containers_total",
            "Cumulative number of hostprocess containers started. This metric will only be collected on Windows.",
            &["container_type"],
        );
        counters(
            "kubelet_started_host_process_containers_errors_total",
            "Cumulative number of errors when starting hostprocess containers. This metric will only be collected on Windows.",
            &["container_type", "code"],
        );
        Self {
            run_sandbox: histograms(
                "kubelet_run_podsandbox_duration_seconds",
                "Duration in seconds of the run_podsandbox operations. Broken down by RuntimeClass.Handler.",
                buckets::DEF,
                "runtime_handler",
            ),
            run_sandbox_errors: counters(
                "kubelet_run_podsandbox_errors_total",
                "Cumulative number of the run_podsandbox operation errors by RuntimeClass.Handler.",
                &["runtime_handler"],
            ),
            started_pods: counter("kubelet_started_pods_total", "Cumulative number of pods started"),
            started_pods_errors: counter(
                "kubelet_started_pods_errors_total",
                "Cumulative number of errors when starting pods",
            ),
            started_userns_pods: counter(
                "kubelet_started_user_namespaced_pods_total",
                "Cumulative number of pods with user namespaces started",
            ),
            started_userns_pods_errors: counter(
                "kubelet_started_user_namespaced_pods_errors_total",
                "Cumulative number of errors when starting pods with user namespaces",
            ),
            started_containers: counters(
                "kubelet_started_containers_total",
                "Cumulative number of containers started",
                &["container_type"],
            ),
            started_containers_errors: counters(
                "kubelet_started_containers_errors_total",
                "Cumulative number of errors when starting containers",
                &["container_type", "code"],
            ),
            image_volumes_requested: registry.counter(
                Stability::Beta,
                "kubelet_image_volume_requested_total",
                "Number of requested image volumes.",
            ),
            image_volumes_mounted: registry.counter(
                Stability::Beta,
                "kubelet_image_volume_mounted_succeed_total",
                "Number of successful image volume mounts.",
            ),
            image_volumes_failed: registry.counter(
                Stability::Beta,
                "kubelet_image_volume_mounted_errors_total",
                "Number of failed image volume mounts.",
            ),
            sleep_cut: counter(
                "kubelet_sleep_action_terminated_early_total",
                "The number of times lifecycle sleep handler got terminated before it finishes",
            ),
            http_fallbacks: counter(
                "kubelet_lifecycle_handler_http_fallbacks_total",
                "The number of times lifecycle handlers successfully fell back to http from https.",
            ),
            resize: histograms(
                "kubelet_pod_resize_duration_milliseconds",
                "Duration in milliseconds to actuate a pod resize",
                RESIZE,
                "success",
            ),
        }
    }
}
