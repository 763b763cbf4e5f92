//! Health checks as indicators of the service level (spec 08 §7): a registry of their own, which can be
//! emptied.

use std::sync::Arc;

use prometheus::{IntCounterVec, IntGaugeVec};

use super::{Registry, Stability};

/// The families of `/metrics/slis`; clones share them.
#[derive(Clone)]
pub struct SliMetrics(Arc<Families>);

struct Families {
    registry: Registry,
    now: IntGaugeVec,
    total: IntCounterVec,
}

/// The `type` label: which set of checks was asked.
const HEALTHZ: &str = "healthz";

impl SliMetrics {
    /// `started` is the process start in seconds since the epoch.
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

    /// A check was asked as one of all, and passed or not.
    pub fn checked(&self, name: &str, passed: bool) {
        let status = if passed { "success" } else { "error" };
        self.0.now.with_label_values(&[name, HEALTHZ]).set(i64::from(passed));
        self.0.total.with_label_values(&[name, HEALTHZ, status]).inc();
    }

    /// Forgets all checks.
    pub fn reset(&self) {
        self.0.now.reset();
        self.0.total.reset();
    }

    /// The registry of the page.
    pub fn registry(&self) -> &Registry {
        &self.0.registry
    }
}
