//! Metrics of the topology manager, and alignment counters of all resource managers (spec 06b §1.13, §3.5).

use std::time::Duration;

use prometheus::{Histogram, IntCounter, IntCounterVec};

use super::{Registry, Stability::Alpha};

/// `TOPO`, milliseconds: 15 bounds, each twice the one before.
const BUCKETS: &[f64] = &[0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4, 204.8, 409.6, 819.2];

/// What is aligned as a whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AlignmentScope {
    /// Each container on its own.
    Container,
    /// All containers of a pod together.
    Pod,
}

impl AlignmentScope {
    /// Value of the label `scope`.
    fn name(self) -> &'static str {
        match self {
            Self::Container => "container",
            Self::Pod => "pod",
        }
    }
}

/// Unit of the hardware that aligned resources do not leave.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AlignmentBoundary {
    /// Whole cores, with all their hardware threads.
    PhysicalCpu,
    /// One NUMA node.
    NumaNode,
    /// CPUs that share a cache of level 3 or higher.
    UncoreCache,
}

impl AlignmentBoundary {
    /// Value of the label `boundary`.
    fn name(self) -> &'static str {
        match self {
            Self::PhysicalCpu => "physical_cpu",
            Self::NumaNode => "numa_node",
            Self::UncoreCache => "uncore_cache",
        }
    }
}

/// Metric handles of the topology manager; the CPU manager counts alignment with a clone of them.
#[derive(Clone, Debug)]
pub struct TopologyManagerMetrics {
    requests: IntCounter,
    errors: IntCounter,
    duration: Histogram,
    aligned: IntCounterVec,
    not_aligned: IntCounterVec,
}

impl TopologyManagerMetrics {
    /// Registers the families. The alignment counters of `pairs`, those that the active policies can change, start
    /// at 0.
    pub fn new(registry: &Registry, pairs: &[(AlignmentScope, AlignmentBoundary)]) -> Self {
        let labels = &["scope", "boundary"];
        let metrics = Self {
            requests: registry.counter(
                Alpha,
                "kubelet_topology_manager_admission_requests_total",
                "The number of admission requests where resources have to be aligned.",
            ),
            errors: registry.counter(
                Alpha,
                "kubelet_topology_manager_admission_errors_total",
                "The number of admission request failures where resources could not be aligned.",
            ),
            duration: registry.histogram(
                Alpha,
                "kubelet_topology_manager_admission_duration_ms",
                "Duration in milliseconds to serve a pod admission request.",
                BUCKETS,
            ),
            aligned: registry.counters(
                Alpha,
                "kubelet_container_aligned_compute_resources_count",
                "Cumulative number of aligned compute resources allocated to containers by alignment type.",
                labels,
            ),
            not_aligned: registry.counters(
                Alpha,
                "kubelet_container_aligned_compute_resources_failure_count",
                "Cumulative number of failures to allocate aligned compute resources to containers by alignment type.",
                labels,
            ),
        };
        for (scope, boundary) in pairs {
            let values = [scope.name(), boundary.name()];
            metrics.aligned.with_label_values(&values).inc_by(0);
            metrics.not_aligned.with_label_values(&values).inc_by(0);
        }
        metrics
    }

    /// Counts a pod that the topology manager decides about.
    pub fn admission_requested(&self) {
        self.requests.inc();
    }

    /// Counts a pod that is refused, or whose resources a provider cannot allocate.
    pub fn admission_refused(&self) {
        self.errors.inc();
    }

    /// Observes the duration of a decision, with fractions of a millisecond.
    pub fn admission_took(&self, took: Duration) {
        self.duration.observe(took.as_secs_f64() * 1000.0);
    }

    /// Counts a container or pod whose resources lie within the boundary.
    pub fn aligned(&self, scope: AlignmentScope, boundary: AlignmentBoundary) {
        self.aligned.with_label_values(&[scope.name(), boundary.name()]).inc();
    }

    /// Counts a container or pod that is refused because its resources would leave the boundary.
    pub fn not_aligned(&self, scope: AlignmentScope, boundary: AlignmentBoundary) {
        self.not_aligned.with_label_values(&[scope.name(), boundary.name()]).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Boundary, scope, and value of each series.
    fn series(registry: &Registry, name: &str) -> Vec<(String, String, f64)> {
        let families = registry.gather();
        let family = families.iter().find(|family| family.name() == name);
        let series = family.into_iter().flat_map(|family| family.get_metric());
        let entries = series.map(|series| {
            let labels = series.get_label();
            assert_eq!((labels[0].name(), labels[1].name()), ("boundary", "scope"));
            (labels[0].value().to_owned(), labels[1].value().to_owned(), series.get_counter().get_value())
        });
        entries.collect()
    }

    #[test]
    fn alignment_counters_of_the_active_policies_start_at_zero() {
        let registry = Registry::new();
        let pairs = [
            (AlignmentScope::Container, AlignmentBoundary::NumaNode),
            (AlignmentScope::Pod, AlignmentBoundary::NumaNode),
            (AlignmentScope::Container, AlignmentBoundary::PhysicalCpu),
        ];
        let metrics = TopologyManagerMetrics::new(&registry, &pairs);
        let expected = |container: f64| {
            vec![
                ("numa_node".to_owned(), "container".to_owned(), container),
                ("numa_node".to_owned(), "pod".to_owned(), 0.0),
                ("physical_cpu".to_owned(), "container".to_owned(), 0.0),
            ]
        };
        let (aligned, not_aligned) = (
            "kubelet_container_aligned_compute_resources_count",
            "kubelet_container_aligned_compute_resources_failure_count",
        );
        assert_eq!(series(&registry, aligned), expected(0.0));
        assert_eq!(series(&registry, not_aligned), expected(0.0));
        metrics.aligned(AlignmentScope::Container, AlignmentBoundary::NumaNode);
        assert_eq!((series(&registry, aligned), series(&registry, not_aligned)), (expected(1.0), expected(0.0)));
        metrics.not_aligned(AlignmentScope::Container, AlignmentBoundary::NumaNode);
        assert_eq!((series(&registry, aligned), series(&registry, not_aligned)), (expected(1.0), expected(1.0)));
        metrics.aligned(AlignmentScope::Container, AlignmentBoundary::UncoreCache);
        assert_eq!(series(&registry, aligned).len(), 4);
    }

    #[test]
    fn durations_keep_fractions_of_a_millisecond() {
        let metrics = TopologyManagerMetrics::new(&Registry::new(), &[]);
        metrics.admission_took(Duration::from_micros(60));
        metrics.admission_took(Duration::from_micros(300));
        assert_eq!(metrics.duration.get_sample_count(), 2);
        assert!((metrics.duration.get_sample_sum() - 0.36).abs() < 1e-9, "{}", metrics.duration.get_sample_sum());
        metrics.admission_requested();
        metrics.admission_refused();
        assert_eq!((metrics.requests.get(), metrics.errors.get()), (1, 1));
    }
}
