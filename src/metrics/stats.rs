//! Families of statistics: what reading them costs (spec 08 §10).

use std::time::Duration;

use prometheus::{Histogram, IntGauge};

use super::{Registry, Stability::Alpha, buckets::DEF};

/// Handles of the families of statistics.
#[derive(Clone, Debug)]
pub struct StatsMetrics {
    seconds: Histogram,
    cgroups: IntGauge,
}

impl StatsMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let seconds = registry.histograms(
            Alpha,
            "nodeagent_stats_collection_seconds",
            "Duration in seconds of one reading of statistics.",
            DEF,
            &["scope"],
        );
        Self {
            seconds: seconds.with_label_values(&["pods"]),
            cgroups: registry.gauge(Alpha, "nodeagent_stats_cgroups", "Number of control groups that are watched."),
        }
    }

    /// Counts a reading of the control groups of all pods, and how many there were.
    pub fn read(&self, elapsed: Duration, cgroups: usize) {
        self.seconds.observe(elapsed.as_secs_f64());
        self.cgroups.set(i64::try_from(cgroups).unwrap_or(i64::MAX));
    }
}
