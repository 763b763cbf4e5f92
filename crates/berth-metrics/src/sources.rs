//! What the sources count. The reference counts nothing here, so all names are our own.

use prometheus::{IntCounterVec, IntGaugeVec};

use super::{Registry, Stability};

/// Families of the sources; `source` is `file`, `http` or `api`.
#[derive(Clone, Debug)]
pub struct SourceMetrics {
    /// Pods that were ignored because another one has their name.
    pub duplicates: IntCounterVec,
    /// Manifests that could not be used; `reason` is `read`, `parse` or `invalid`.
    pub rejected: IntCounterVec,
    /// Looks at a source that failed as a whole.
    pub failures: IntCounterVec,
    /// Pods in the last set.
    pub pods: IntGaugeVec,
}

impl SourceMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let counters = |name, help, labels: &[&str]| registry.counters(Stability::Alpha, name, help, labels);
        Self {
            duplicates: counters(
                "berth_source_duplicates_total",
                "Cumulative number of pods ignored because another pod of the source has their name.",
                &["source"],
            ),
            rejected: counters(
                "berth_source_rejected_manifests_total",
                "Cumulative number of manifests that could not be used, by reason.",
                &["source", "reason"],
            ),
            failures: counters(
                "berth_source_failures_total",
                "Cumulative number of looks at a pod source that failed as a whole.",
                &["source"],
            ),
            pods: registry.gauges(
                Stability::Alpha,
                "berth_source_pods",
                "Number of pods in the last set of a pod source.",
                &["source"],
            ),
        }
    }
}
