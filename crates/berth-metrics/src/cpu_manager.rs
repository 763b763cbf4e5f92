//! Metrics of the CPU manager (spec 06b §1.13, 08 §4.10).

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
};

use prometheus::{IntCounter, IntGauge, IntGaugeVec};

use super::{Registry, Stability::Alpha};

/// Metric handles of the CPU manager.
#[derive(Clone, Debug)]
pub struct CpuManagerMetrics {
    requests: IntCounter,
    errors: IntCounter,
    shared_pool: IntGauge,
    exclusive: IntGauge,
    per_node: IntGaugeVec,
    /// NUMA nodes that have a series.
    nodes: Arc<Mutex<BTreeSet<u32>>>,
}

impl CpuManagerMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        Self {
            requests: registry.counter(
                Alpha,
                "kubelet_cpu_manager_pinning_requests_total",
                "The number of cpu core allocations which required pinning.",
            ),
            errors: registry.counter(
                Alpha,
                "kubelet_cpu_manager_pinning_errors_total",
                "The number of cpu core allocations which required pinning failed.",
            ),
            shared_pool: registry.gauge(
                Alpha,
                "kubelet_cpu_manager_shared_pool_size_millicores",
                "The size of the shared CPU pool for non-guaranteed QoS pods, in millicores.",
            ),
            exclusive: registry.gauge(
                Alpha,
                "kubelet_cpu_manager_exclusive_cpu_allocation_count",
                "The total number of CPUs exclusively allocated to containers running on this node",
            ),
            per_node: registry.gauges(
                Alpha,
                "kubelet_cpu_manager_allocation_per_numa",
                "Number of CPUs allocated per NUMA node",
                &["numa_node"],
            ),
            nodes: Arc::default(),
        }
    }

    /// Counts a container that needs exclusive CPUs, also one that already has them.
    pub fn pinning_requested(&self) {
        self.requests.inc();
    }

    /// Counts a container that did not get its exclusive CPUs.
    pub fn pinning_failed(&self) {
        self.errors.inc();
    }

    /// Sets the size of the shared pool without the reserved CPUs; exposed in millicores.
    pub fn set_shared_pool(&self, cpus: usize) {
        self.shared_pool.set(gauge_value(cpus).saturating_mul(1000));
    }

    /// Sets the number of exclusive CPUs: of the machine, and by NUMA node. A node that had a value before and is
    /// absent now gets 0.
    pub fn set_exclusive(&self, cpus: usize, per_node: &BTreeMap<u32, usize>) {
        self.exclusive.set(gauge_value(cpus));
        let mut nodes = self.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        nodes.extend(per_node.keys());
        for node in &*nodes {
            let count = per_node.get(node).copied().unwrap_or(0);
            self.per_node.with_label_values(&[node.to_string()]).set(gauge_value(count));
        }
    }
}

/// A count as the value of a gauge; the largest value if it does not fit.
fn gauge_value(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocation_per_node(registry: &Registry) -> Vec<(String, f64)> {
        let families = registry.gather();
        let family = families.iter().find(|family| family.name() == "kubelet_cpu_manager_allocation_per_numa");
        let series = family.into_iter().flat_map(|family| family.get_metric());
        series.map(|series| (series.get_label()[0].value().to_owned(), series.get_gauge().get_value())).collect()
    }

    #[test]
    fn the_allocation_of_a_numa_node_returns_to_zero() {
        let registry = Registry::new();
        let metrics = CpuManagerMetrics::new(&registry);
        assert!(allocation_per_node(&registry).is_empty());
        let series = |values: &[(&str, f64)]| -> Vec<(String, f64)> {
            values.iter().map(|(node, value)| ((*node).to_owned(), *value)).collect()
        };
        for (per_node, expected) in [
            (BTreeMap::<u32, usize>::from([(0, 0), (1, 4)]), series(&[("0", 0.0), ("1", 4.0)])),
            (BTreeMap::from([(0, 2)]), series(&[("0", 2.0), ("1", 0.0)])),
            (BTreeMap::new(), series(&[("0", 0.0), ("1", 0.0)])),
        ] {
            metrics.set_exclusive(per_node.values().sum(), &per_node);
            assert_eq!(allocation_per_node(&registry), expected, "{per_node:?}");
        }
    }

    #[test]
    fn the_shared_pool_is_exposed_in_millicores() {
        let registry = Registry::new();
        let metrics = CpuManagerMetrics::new(&registry);
        metrics.pinning_requested();
        metrics.pinning_requested();
        metrics.pinning_failed();
        metrics.set_shared_pool(7);
        metrics.set_exclusive(5, &BTreeMap::new());
        let (requests, errors) = (metrics.requests.get(), metrics.errors.get());
        assert_eq!((requests, errors, metrics.shared_pool.get(), metrics.exclusive.get()), (2, 1, 7000, 5));
    }
}
