//! Metrics of in-place resize up to its acceptance (spec 08 §4.11).

use prometheus::{IntCounterVec, IntGauge, IntGaugeVec};

use super::{Registry, Stability};

/// Metric handles of in-place resize.
#[derive(Clone, Debug)]
pub struct AllocationMetrics {
    /// Changed resource values in pod updates; labels `resource`, `requirement`, `operation`.
    pub requested: IntCounterVec,
    /// Pending resizes; label `reason`. A reason without pods has no series.
    pub pending: IntGaugeVec,
    /// Resizes in progress.
    pub in_progress: IntGauge,
    /// Resizes rejected as infeasible; label `reason_detail`.
    pub infeasible: IntCounterVec,
    /// Deferred resizes accepted later; label `retry_trigger`.
    pub deferred_accepted: IntCounterVec,
}

impl AllocationMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let alpha = Stability::Alpha;
        Self {
            requested: registry.counters(
                alpha,
                "kubelet_container_requested_resizes_total",
                "Number of requested resizes, counted at the container level.",
                &["resource", "requirement", "operation"],
            ),
            pending: registry.gauges(
                alpha,
                "kubelet_pod_pending_resizes",
                "Number of pending resizes for pods.",
                &["reason"],
            ),
            in_progress: registry.gauge(
                alpha,
                "kubelet_pod_in_progress_resizes",
                "Number of in-progress resizes for pods.",
            ),
            infeasible: registry.counters(
                alpha,
                "kubelet_pod_infeasible_resizes_total",
                "Number of infeasible resizes for pods.",
                &["reason_detail"],
            ),
            deferred_accepted: registry.counters(
                alpha,
                "kubelet_pod_deferred_accepted_resizes_total",
                "Cumulative number of resizes that were accepted after being deferred.",
                &["retry_trigger"],
            ),
        }
    }
}
