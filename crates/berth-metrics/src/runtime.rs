//! Starts of pods and containers, hooks and resizes (spec 08 §4.4, §4.6, §4.11).

use prometheus::{HistogramVec, IntCounter, IntCounterVec};

use super::{Registry, Stability, buckets};

/// Handles of the runtime room.
#[derive(Clone, Debug)]
pub struct RuntimeMetrics {
    /// Seconds `RunPodSandbox` took, by `runtime_handler`.
    pub run_sandbox: HistogramVec,
    /// Failed `RunPodSandbox`, by `runtime_handler`.
    pub run_sandbox_errors: IntCounterVec,
    /// Sandbox creations attempted.
    pub started_pods: IntCounter,
    /// Sandbox creations failed.
    pub started_pods_errors: IntCounter,
    /// The same for pods with a user namespace of their own.
    pub started_userns_pods: IntCounter,
    /// Passes that started such a pod and had any error.
    pub started_userns_pods_errors: IntCounter,
    /// Container starts attempted, by `container_type`.
    pub started_containers: IntCounterVec,
    /// Container starts failed, by `container_type` and `code`.
    pub started_containers_errors: IntCounterVec,
    /// Image volumes that containers were to be created with.
    pub image_volumes_requested: IntCounter,
    /// Image volumes of containers that were created.
    pub image_volumes_mounted: IntCounter,
    /// Image volumes of containers that were not created because of one of them.
    pub image_volumes_failed: IntCounter,
    /// Sleep hooks cut by the grace period.
    pub sleep_cut: IntCounter,
    /// Hooks that were retried over http with success.
    pub http_fallbacks: IntCounter,
    /// Milliseconds a resize took, by `success`.
    pub resize: HistogramVec,
}

/// `RESIZE`, milliseconds.
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
