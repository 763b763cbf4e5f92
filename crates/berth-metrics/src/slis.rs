//! Health check SLI metrics, in a resettable registry of their own (spec 08 §7).

use std::sync::Arc;

use prometheus::{IntCounterVec, IntGaugeVec};

use super::{Registry, Stability};

/// Metric handles of `/metrics/slis`; clones share them.
#[derive(Clone)]
pub struct SliMetrics(Arc<Families>);

struct Families {
    registry: Registry,
    now: IntGaugeVec,
    total: IntCounterVec,
}

/// Value of the label `type`: the set of checks.
const HEALTHZ: &str = "healthz";

impl SliMetrics {
    /// Creates the registry. `started` is the start time of the process, seconds since the epoch.
    pub fn new(started: f64) -> Self {
        let registry = Registry::new();
        let now = registry.gauges(
            Stability::Stable,
            "kubernetes_healthcheck",
            "This metric records the result of a single healthcheck.",
            &["name", "type"],
        );
        let total = registry.counters(
            Stability::Stable,
            "kubernetes_healthchecks_total",
            "This metric records the results of all healthcheck.",
            &["name", "type", "status"],
        );
        let help = "Start time of the process since unix epoch in seconds.";
        registry.float_gauge(Stability::Alpha, "process_start_time_seconds", help).set(started);
        Self(Arc::new(Families { registry, now, total }))
    }

    /// Records the result of a check that ran as part of the full set.
    pub fn checked(&self, name: &str, passed: bool) {
        let status = if passed { "success" } else { "error" };
        self.0.now.with_label_values(&[name, HEALTHZ]).set(i64::from(passed));
        self.0.total.with_label_values(&[name, HEALTHZ, status]).inc();
    }

    /// Removes the series of all checks.
    pub fn reset(&self) {
        self.0.now.reset();
        self.0.total.reset();
    }

    /// Returns the registry of the page.
    pub fn registry(&self) -> &Registry {
        &self.0.registry
    }
}
