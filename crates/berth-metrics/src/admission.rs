//! Metrics of pod admission and preemption (spec 08 §4.8).

use prometheus::IntCounterVec;

use super::{Registry, Stability};

/// Metric handles of admission and preemption.
#[derive(Clone, Debug)]
pub struct AdmissionMetrics {
    /// Rejected pods; label `reason`, a closed set.
    pub rejections: IntCounterVec,
    /// Pods preempted for a critical pod; label `preemption_signal`: the first insufficient resource, or "".
    pub preemptions: IntCounterVec,
}

impl AdmissionMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let alpha = Stability::Alpha;
        Self {
            rejections: registry.counters(
                alpha,
                "kubelet_admission_rejections_total",
                "Cumulative number pod admission rejections by the Kubelet.",
                &["reason"],
            ),
            preemptions: registry.counters(
                alpha,
                "kubelet_preemptions",
                "Cumulative number of pod preemptions by preemption resource",
                &["preemption_signal"],
            ),
        }
    }
}
