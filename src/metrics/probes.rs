//! Families of `/metrics/probes` (spec 04b §10, 08 §6). They have a registry of their own; a series
//! appears with the first probe of a container.

use prometheus::{HistogramVec, IntCounterVec};

use super::{Registry, Stability, buckets::DEF, start_time_seconds};

/// Handles of the families of probes.
pub struct ProbeMetrics {
    /// `prober_probe_total`, by probe type, result, container, pod, namespace and UID.
    pub total: IntCounterVec,
    /// `prober_probe_duration_seconds`, by probe type, container, pod and namespace.
    pub duration: HistogramVec,
}

impl ProbeMetrics {
    /// Registers the families, and when the process started.
    pub fn new(registry: &Registry) -> Self {
        let help = "Start time of the process since unix epoch in seconds.";
        let started = registry.float_gauge(Stability::Alpha, "process_start_time_seconds", help);
        started.set(start_time_seconds().unwrap_or_default());
        Self {
            total: registry.counters(
                Stability::Beta,
                "prober_probe_total",
                "Cumulative number of a liveness, readiness or startup probe for a container by result.",
                &["probe_type", "result", "container", "pod", "namespace", "pod_uid"],
            ),
            duration: registry.histograms(
                Stability::Alpha,
                "prober_probe_duration_seconds",
                "Duration in seconds for a probe response.",
                DEF,
                &["probe_type", "container", "pod", "namespace"],
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::exposition::Format;

    #[test]
    fn before_the_first_probe_only_the_start_is_told() {
        let registry = Registry::new();
        let probes = ProbeMetrics::new(&registry);
        let page = |registry: &Registry| {
            let mut out = Vec::new();
            Format::negotiate(None).encode(registry.gather(), &mut out);
            String::from_utf8(out).expect("text")
        };
        let types = |page: &str| page.lines().filter(|l| l.starts_with("# TYPE")).count();
        assert_eq!(types(&page(&registry)), 1);
        probes.total.with_label_values(&["Liveness", "successful", "c", "p", "ns", "u"]).inc();
        assert!(page(&registry).contains("# HELP prober_probe_total [BETA] "));
    }
}
