//! Metrics of trace export.

use prometheus::IntCounter;

use super::{Registry, Stability::Alpha};

/// Metric handle of trace export.
#[derive(Clone, Debug)]
pub struct TraceMetrics {
    dropped: IntCounter,
}

impl TraceMetrics {
    /// Registers the family; only where traces are exported.
    pub fn new(registry: &Registry) -> Self {
        let help = "Cumulative number of sampled spans that were not exported.";
        Self { dropped: registry.counter(Alpha, "berth_spans_dropped_total", help) }
    }

    /// Counts spans that are lost.
    pub fn dropped(&self, spans: usize) {
        self.dropped.inc_by(u64::try_from(spans).unwrap_or(u64::MAX));
    }
}
