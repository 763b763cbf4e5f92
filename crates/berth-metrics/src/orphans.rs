//! Metrics of the orphaned pod directory cleanup. Implements spec 07 §5.4, 08 §4.9.

use prometheus::IntGauge;

use super::{Registry, Stability::Alpha};

/// Metric handles of the orphan cleanup.
#[derive(Clone, Debug)]
pub struct OrphanMetrics {
    cleaned: IntGauge,
    errors: IntGauge,
}

impl OrphanMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        Self {
            cleaned: registry.gauge(
                Alpha,
                "kubelet_orphan_pod_cleaned_volumes",
                "The total number of orphaned Pods whose volumes were cleaned in the last periodic sweep.",
            ),
            errors: registry.gauge(
                Alpha,
                "kubelet_orphan_pod_cleaned_volumes_errors",
                "The number of orphaned Pods whose volumes failed to be cleaned in the last periodic sweep.",
            ),
        }
    }

    /// Starts a sweep: resets the cleaned count; `refused` directories could not be removed so far.
    pub fn begin(&self, refused: usize) {
        self.cleaned.set(0);
        self.failed(refused);
    }

    /// Records a removed directory; `refused` directories are left that cannot be removed.
    pub fn cleaned(&self, had_volumes: bool, refused: usize) {
        self.cleaned.add(i64::from(had_volumes));
        self.failed(refused);
    }

    /// Records the number of directories that cannot be removed.
    pub fn failed(&self, refused: usize) {
        self.errors.set(i64::try_from(refused).unwrap_or(i64::MAX));
    }
}
