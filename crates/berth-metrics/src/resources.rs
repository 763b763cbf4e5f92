//! Metrics of cgroup operations (spec 08 §4.10).

use prometheus::{Histogram, IntGauge};

use super::{Registry, Stability, buckets};

/// Metric handles of the cgroup manager; durations in seconds.
#[derive(Clone, Debug)]
pub struct CgroupMetrics {
    /// Duration of creating a cgroup.
    pub create: Histogram,
    /// Duration of writing a cgroup's values.
    pub update: Histogram,
    /// Duration of removing a cgroup.
    pub destroy: Histogram,
    version: IntGauge,
    protected: Option<ProtectedMemory>,
}

/// Memory requests that memory QoS protects, in bytes.
#[derive(Clone, Debug)]
struct ProtectedMemory {
    min: IntGauge,
    low: IntGauge,
}

impl CgroupMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let durations = registry.histograms(
            Stability::Alpha,
            "kubelet_cgroup_manager_duration_seconds",
            "Duration in seconds for cgroup manager operations. Broken down by method.",
            buckets::DEF,
            &["operation_type"],
        );
        let version = registry.gauge(Stability::Alpha, "kubelet_cgroup_version", "cgroup version on the hosts.");
        let of = |operation| durations.with_label_values(&[operation]);
        Self { create: of("create"), update: of("update"), destroy: of("destroy"), version, protected: None }
    }

    /// Registers the families of the gate `MemoryQoS`.
    #[must_use]
    pub fn with_memory_qos(self, registry: &Registry) -> Self {
        let min = registry.gauge(
            Stability::Alpha,
            "kubelet_memory_qos_node_memory_min_bytes",
            "Total cgroup v2 memory.min in bytes for Guaranteed pods. This memory is hard-reserved and never reclaimed \
             by the kernel.",
        );
        let low = registry.gauge(
            Stability::Alpha,
            "kubelet_memory_qos_node_memory_low_bytes",
            "Total cgroup v2 memory.low in bytes for Burstable pods. This memory is soft-reserved and may be reclaimed \
             under extreme pressure.",
        );
        Self { protected: Some(ProtectedMemory { min, low }), ..self }
    }

    /// Sets the memory requests of Guaranteed and of Burstable pods that are protected, in bytes.
    pub fn set_protected_memory(&self, guaranteed: u64, burstable: u64) {
        if let Some(protected) = &self.protected {
            let bytes = |bytes| i64::try_from(bytes).unwrap_or(i64::MAX);
            protected.min.set(bytes(guaranteed));
            protected.low.set(bytes(burstable));
        }
    }

    /// Sets the cgroup version of the machine: 1 or 2.
    pub fn set_version(&self, version: u8) {
        self.version.set(i64::from(version));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_families_have_the_documented_names() {
        let registry = Registry::new();
        CgroupMetrics::new(&registry).set_version(2);
        let families = registry.gather();
        let names: Vec<&str> = families.iter().map(|f| f.name()).collect();
        assert_eq!(names, ["kubelet_cgroup_manager_duration_seconds", "kubelet_cgroup_version"]);
    }

    #[test]
    fn protected_memory_has_metrics_with_the_gate() {
        // AC-06a-27
        let registry = Registry::new();
        CgroupMetrics::new(&registry).with_memory_qos(&registry).set_protected_memory(134_217_728, 402_653_184);
        let values: Vec<(String, f64)> = registry
            .gather()
            .iter()
            .filter(|family| family.name().starts_with("kubelet_memory_qos"))
            .map(|family| (family.name().to_owned(), family.get_metric()[0].get_gauge().get_value()))
            .collect();
        let expected = [("low", 402_653_184.0), ("min", 134_217_728.0)];
        let name = |end: &str| format!("kubelet_memory_qos_node_memory_{end}_bytes");
        assert_eq!(values, expected.map(|(end, bytes)| (name(end), bytes)));
    }
}
