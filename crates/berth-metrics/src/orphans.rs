//! What became of the directories of pods that nobody knows (spec 07 §5.4, 08 §4.9).

use prometheus::IntGauge;

use super::{Registry, Stability::Alpha};

/// Handles of what is counted of orphans.
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

    /// A sweep begins; so many could not be removed before.
    pub fn begin(&self, refused: usize) {
        self.cleaned.set(0);
        self.failed(refused);
    }

    /// One was removed, with volumes or without; so many are left.
    pub fn cleaned(&self, had_volumes: bool, refused: usize) {
        self.cleaned.add(i64::from(had_volumes));
        self.failed(refused);
    }

    /// So many cannot be removed.
    pub fn failed(&self, refused: usize) {
        self.errors.set(i64::try_from(refused).unwrap_or(i64::MAX));
    }
}
