//! Metrics of OOM kills.

use prometheus::IntCounterVec;

use super::{Registry, Stability::Alpha};

/// Metric handle of OOM kills; the label `scope` has a closed set of values.
#[derive(Clone, Debug)]
pub struct OomMetrics(IntCounterVec);

impl OomMetrics {
    /// Registers the family with every scope at 0: `increase()` misses a series that starts at one.
    pub fn new(registry: &Registry) -> Self {
        let family = registry.counters(
            Alpha,
            "berth_oom_kills_total",
            "Cumulative number of OOM kills, by scope: system, pod (memory limit of a pod or container), or other cgroup",
            &["scope"],
        );
        for scope in ["system", "pod", "other"] {
            family.with_label_values(&[scope]);
        }
        Self(family)
    }

    /// Counts a killed process.
    pub fn killed(&self, scope: &'static str) {
        self.0.with_label_values(&[scope]).inc();
    }
}
