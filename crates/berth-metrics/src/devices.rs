//! Metrics of device plugins (spec 08 §4.9).

use std::time::Duration;

use prometheus::{HistogramVec, IntCounterVec};

use super::{Registry, Stability::Alpha};

/// Metric handles of the device manager.
#[derive(Clone, Debug)]
pub struct DeviceMetrics {
    registrations: IntCounterVec,
    allocations: HistogramVec,
}

impl DeviceMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        Self {
            registrations: registry.counters(
                Alpha,
                "kubelet_device_plugin_registration_total",
                "Cumulative number of device plugin registrations. Broken down by resource name.",
                &["resource_name"],
            ),
            allocations: registry.histograms(
                Alpha,
                "kubelet_device_plugin_alloc_duration_seconds",
                "Duration in seconds to serve a device plugin Allocation request. Broken down by resource name.",
                prometheus::DEFAULT_BUCKETS,
                &["resource_name"],
            ),
        }
    }

    /// Counts a registration.
    pub fn registered(&self, resource: &str) {
        self.registrations.with_label_values(&[resource]).inc();
    }

    /// Observes the duration of one `Allocate` call.
    pub fn allocated(&self, resource: &str, took: Duration) {
        self.allocations.with_label_values(&[resource]).observe(took.as_secs_f64());
    }
}
