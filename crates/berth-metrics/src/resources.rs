//! Metrics of cgroup operations (spec 08 §4.10).

use prometheus::Histogram;

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
    version: prometheus::IntGauge,
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
        Self { create: of("create"), update: of("update"), destroy: of("destroy"), version }
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
}
