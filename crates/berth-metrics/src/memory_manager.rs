//! Metrics of the memory manager (spec 06b §2.7, 08 §4.10).

use prometheus::IntCounter;

use super::{Registry, Stability::Alpha};

/// Metric handles of the memory manager.
#[derive(Clone, Debug)]
pub struct MemoryManagerMetrics {
    requests: IntCounter,
    errors: IntCounter,
}

impl MemoryManagerMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        Self {
            requests: registry.counter(
                Alpha,
                "kubelet_memory_manager_pinning_requests_total",
                "The number of memory pages allocations which required pinning.",
            ),
            errors: registry.counter(
                Alpha,
                "kubelet_memory_manager_pinning_errors_total",
                "The number of memory pages allocations which required pinning that failed.",
            ),
        }
    }

    /// Counts a container of a Guaranteed pod, also one without a memory request.
    pub fn pinning_requested(&self) {
        self.requests.inc();
    }

    /// Counts a container whose memory could not be placed.
    pub fn pinning_failed(&self) {
        self.errors.inc();
    }
}
