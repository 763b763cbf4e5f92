//! Metrics of the pod sources. The reference has none, so all names are Berth's own.

use prometheus::{IntCounterVec, IntGaugeVec};

use super::{Registry, Stability};

/// Metric handles of the pod sources; `source` is `file`, `http`, or `api`.
#[derive(Clone, Debug)]
pub struct SourceMetrics {
    /// Pods ignored because another pod of the source has the same name.
    pub duplicates: IntCounterVec,
    /// Unusable manifests; `reason` is `read`, `parse`, or `invalid`.
    pub rejected: IntCounterVec,
    /// Reads of a source that failed as a whole.
    pub failures: IntCounterVec,
    /// Pods in the last complete set of a source.
    pub pods: IntGaugeVec,
}

impl SourceMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let counters = |name, help, labels: &[&str]| registry.counters(Stability::Alpha, name, help, labels);
        Self {
            duplicates: counters(
                "berth_source_duplicates_total",
                "Cumulative number of pods ignored because their name duplicates that of another pod of the same source.",
                &["source"],
            ),
            rejected: counters(
                "berth_source_rejected_manifests_total",
                "Cumulative number of rejected manifests, by reason.",
                &["source", "reason"],
            ),
            failures: counters(
                "berth_source_failures_total",
                "Cumulative number of failed reads of a pod source.",
                &["source"],
            ),
            pods: registry.gauges(
                Stability::Alpha,
                "berth_source_pods",
                "Number of pods in the last complete set of a pod source.",
                &["source"],
            ),
        }
    }
}
