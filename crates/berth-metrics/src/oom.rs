//! Processes that were killed for want of memory.

use prometheus::IntCounterVec;

use super::{Registry, Stability::Alpha};

/// Handle of the family; the label is one of a closed set.
#[derive(Clone, Debug)]
pub struct OomMetrics(IntCounterVec);

impl OomMetrics {
    /// Registers the family, every scope at zero: who asks for an increase misses a series that begins with one.
    pub fn new(registry: &Registry) -> Self {
        let family = registry.counters(
            Alpha,
            "berth_oom_kills_total",
            "Processes the kernel killed for want of memory: of the whole machine, of a pod's limit, or of another group's",
            &["scope"],
        );
        for scope in ["system", "pod", "other"] {
            family.with_label_values(&[scope]);
        }
        Self(family)
    }

    /// One was killed.
    pub fn killed(&self, scope: &'static str) {
        self.0.with_label_values(&[scope]).inc();
    }
}
