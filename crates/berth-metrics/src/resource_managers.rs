//! Metrics of allocations by the CPU and memory managers to containers and pods (spec 06b §1.13, 08 §4.10).

use prometheus::IntCounterVec;

use super::{Registry, Stability::Alpha};

/// Resource of a manager.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ManagedResource {
    /// CPU manager.
    Cpu,
    /// Memory manager.
    Memory,
}

impl ManagedResource {
    /// Value of the label `resource_name`.
    fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Memory => "memory",
        }
    }
}

/// Where a container gets its resources from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AllocationSource {
    /// What the node has available.
    Node,
    /// What its pod has as a whole.
    Pod,
}

impl AllocationSource {
    /// Value of the label `source`.
    fn name(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Pod => "pod",
        }
    }
}

/// Exclusiveness of the resources of a container.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AssignmentKind {
    /// Of the container alone, from the node.
    NodeExclusive,
    /// Of the container alone, a part of what its pod has.
    PodExclusive,
    /// Of all containers in the pool of the pod.
    PodShared,
}

impl AssignmentKind {
    /// Value of the label `assignment_type`.
    fn name(self) -> &'static str {
        match self {
            Self::NodeExclusive => "node_exclusive",
            Self::PodExclusive => "pod_exclusive",
            Self::PodShared => "pod_shared",
        }
    }
}

/// Metric handles of the gate `PodLevelResourceManagers`. The names have no prefix, as in the reference.
#[derive(Clone, Debug)]
pub struct ResourceManagerMetrics {
    allocations: IntCounterVec,
    errors: IntCounterVec,
    assignments: IntCounterVec,
}

impl ResourceManagerMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        Self {
            allocations: registry.counters(
                Alpha,
                "resource_manager_allocations_total",
                "Number of exclusive resource allocations performed by a resource manager.",
                &["resource_name", "source"],
            ),
            errors: registry.counters(
                Alpha,
                "resource_manager_allocation_errors_total",
                "Number of errors encountered during exclusive resource allocation.",
                &["resource_name", "source"],
            ),
            assignments: registry.counters(
                Alpha,
                "resource_manager_container_assignments",
                "Number of containers with a specific type of resource assignment.",
                &["resource_name", "assignment_type"],
            ),
        }
    }

    /// Counts allocations: one per container for CPUs, and for memory of a pod; one per block for memory of the node.
    pub fn allocated(&self, resource: ManagedResource, source: AllocationSource, count: usize) {
        add(&self.allocations, [resource.name(), source.name()], count);
    }

    /// Counts a container or pod that did not get its resources.
    pub fn failed(&self, resource: ManagedResource, source: AllocationSource) {
        add(&self.errors, [resource.name(), source.name()], 1);
    }

    /// Counts containers that got resources.
    pub fn assigned(&self, resource: ManagedResource, kind: AssignmentKind, count: usize) {
        add(&self.assignments, [resource.name(), kind.name()], count);
    }
}

/// Without a count there is no series either.
fn add(counters: &IntCounterVec, labels: [&str; 2], count: usize) {
    if count > 0 {
        counters.with_label_values(&labels).inc_by(u64::try_from(count).unwrap_or(u64::MAX));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_resource_source_and_kind_has_a_series() {
        let registry = Registry::new();
        let metrics = ResourceManagerMetrics::new(&registry);
        metrics.allocated(ManagedResource::Cpu, AllocationSource::Pod, 3);
        metrics.allocated(ManagedResource::Memory, AllocationSource::Node, 2);
        metrics.failed(ManagedResource::Memory, AllocationSource::Pod);
        metrics.assigned(ManagedResource::Cpu, AssignmentKind::PodShared, 2);
        metrics.assigned(ManagedResource::Cpu, AssignmentKind::NodeExclusive, 0);
        metrics.assigned(ManagedResource::Memory, AssignmentKind::NodeExclusive, 1);
        metrics.assigned(ManagedResource::Memory, AssignmentKind::PodExclusive, 4);
        let value = |counters: &IntCounterVec, labels: [&str; 2]| counters.with_label_values(&labels).get();
        assert_eq!(value(&metrics.allocations, ["cpu", "pod"]), 3);
        assert_eq!(value(&metrics.allocations, ["memory", "node"]), 2);
        assert_eq!(value(&metrics.errors, ["memory", "pod"]), 1);
        assert_eq!(value(&metrics.assignments, ["cpu", "pod_shared"]), 2);
        assert_eq!(value(&metrics.assignments, ["memory", "node_exclusive"]), 1);
        assert_eq!(value(&metrics.assignments, ["memory", "pod_exclusive"]), 4);
        // The one without containers has no series.
        let families = registry.gather();
        let family = families.iter().find(|family| family.name() == "resource_manager_container_assignments");
        assert_eq!(family.map(|family| family.get_metric().len()), Some(3));
    }
}
