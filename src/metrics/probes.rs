//! Families of `/metrics/probes` (spec 04b §10, 08 §6). They have a registry of their own; a series
//! appears with the first probe of a container.

use std::time::Duration;

use prometheus::{HistogramVec, IntCounterVec};

use super::{Registry, Stability, buckets::DEF, start_time_seconds};

const SUCCESSFUL: &str = "successful";
const FAILED: &str = "failed";

/// Whose probe is counted.
#[derive(Clone, Copy, Debug)]
pub struct ProbedContainer<'a> {
    /// The container's name.
    pub container: &'a str,
    /// The pod's name.
    pub pod: &'a str,
    /// Its namespace.
    pub namespace: &'a str,
    /// Its UID.
    pub uid: &'a str,
}

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

    /// Counts a result that counts; `took` where it was a success.
    pub fn counted(&self, kind: &str, of: &ProbedContainer<'_>, took: Option<Duration>) {
        let result = if took.is_some() { SUCCESSFUL } else { FAILED };
        self.total.with_label_values(&[kind, result, of.container, of.pod, of.namespace, of.uid]).inc();
        if let Some(took) = took {
            self.duration.with_label_values(&[kind, of.container, of.pod, of.namespace]).observe(took.as_secs_f64());
        }
    }

    /// Drops the series of a probe that is over; what never came is no series.
    pub fn forget(&self, kind: &str, of: &ProbedContainer<'_>) {
        for result in [SUCCESSFUL, FAILED] {
            let _ = self.total.remove_label_values(&[kind, result, of.container, of.pod, of.namespace, of.uid]);
        }
        let _ = self.duration.remove_label_values(&[kind, of.container, of.pod, of.namespace]);
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
        let of = ProbedContainer { container: "c", pod: "p", namespace: "ns", uid: "u" };
        probes.counted("Liveness", &of, None);
        assert!(page(&registry).contains("# HELP prober_probe_total [BETA] "));
        assert!(!page(&registry).contains("prober_probe_duration_seconds"), "of successes only");
        probes.counted("Liveness", &of, Some(Duration::from_millis(3)));
        let told = page(&registry);
        for line in [
            r#"prober_probe_total{container="c",namespace="ns",pod="p",pod_uid="u",probe_type="Liveness",result="failed"} 1"#,
            r#"prober_probe_total{container="c",namespace="ns",pod="p",pod_uid="u",probe_type="Liveness",result="successful"} 1"#,
            r#"prober_probe_duration_seconds_bucket{container="c",namespace="ns",pod="p",probe_type="Liveness",le="0.005"} 1"#,
        ] {
            assert!(told.contains(line), "{line} in {told}");
        }
        probes.forget("Liveness", &of);
        assert_eq!(types(&page(&registry)), 1);
    }
}
