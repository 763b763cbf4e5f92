//! Port of the CPU and memory managers: CPUs and NUMA memory nodes of containers.

use async_trait::async_trait;

use berth_types::{ContainerId, CpuSet, Pod, PodUid};

/// CPUs and memory nodes on which a container runs (spec 06b §1.11, §2.7).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ContainerPlacement {
    /// CPUs of the container: its own, or the shared pool; empty for no restriction.
    pub cpus: CpuSet,
    /// Whether the CPUs belong to the container alone, or to the pool of its pod: not to the shared pool of the node.
    pub has_exclusive_cpus: bool,
    /// NUMA nodes of the memory, as a list such as `0,1`; empty for no restriction.
    pub memory_nodes: String,
}

/// Memory of one type that is reserved for a container.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlacedMemory {
    /// `memory`, `hugepages-2Mi`, …
    pub resource: String,
    /// Size in bytes.
    pub bytes: u64,
    /// NUMA node IDs.
    pub nodes: Vec<i64>,
}

/// What the CPU and memory managers can allocate.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct AllocatablePlacement {
    /// CPUs that are not reserved; empty without the static policy.
    pub cpus: CpuSet,
    /// Memory per type and NUMA nodes; empty without the static policy.
    pub memory: Vec<PlacedMemory>,
}

/// Placement of containers. The values are snapshots; reading never blocks.
#[async_trait]
pub trait ContainerPlacements: Send + Sync + 'static {
    /// CPUs and memory nodes of a container.
    fn placement(&self, pod: &PodUid, container: &str) -> ContainerPlacement;

    /// Whether a container runs without CPU quota: its CPUs belong to it alone, and the gate
    /// `DisableCPUQuotaWithExclusiveCPUs` is on.
    fn runs_without_quota(&self, pod: &Pod, container: &str) -> bool;

    /// Whether the cgroup of a pod has no CPU quota: one of its containers runs without.
    fn pod_runs_without_quota(&self, pod: &Pod) -> bool;

    /// Memory that is reserved for a container.
    fn memory(&self, pod: &PodUid, container: &str) -> Vec<PlacedMemory>;

    /// What can be allocated.
    fn allocatable(&self) -> AllocatablePlacement;

    /// What was missing when the CPUs or the memory of a pod could not be aligned or allocated; `None` if the pod was
    /// not refused for them lately.
    fn refusal(&self, pod: &PodUid) -> Option<String>;

    /// Returns the placement for a container that is created next, when the assignments are on disk, and no running
    /// container of the shared pool uses its exclusive CPUs any more.
    ///
    /// # Errors
    /// The text of the failure to write the state file.
    async fn prepare(&self, pod: &PodUid, container: &str) -> Result<ContainerPlacement, String>;

    /// Records that a container was created with the result of [`Self::prepare`]. Memory of init containers before it
    /// is free again.
    fn created(&self, pod: &Pod, container: &str, id: &ContainerId);
}

/// Policies `none`: containers run on all CPUs and memory nodes.
#[derive(Clone, Copy, Debug)]
pub struct NoPlacements;

#[async_trait]
impl ContainerPlacements for NoPlacements {
    fn placement(&self, _: &PodUid, _: &str) -> ContainerPlacement {
        ContainerPlacement::default()
    }

    fn runs_without_quota(&self, _: &Pod, _: &str) -> bool {
        false
    }

    fn pod_runs_without_quota(&self, _: &Pod) -> bool {
        false
    }

    fn memory(&self, _: &PodUid, _: &str) -> Vec<PlacedMemory> {
        Vec::new()
    }

    fn allocatable(&self) -> AllocatablePlacement {
        AllocatablePlacement::default()
    }

    fn refusal(&self, _: &PodUid) -> Option<String> {
        None
    }

    async fn prepare(&self, _: &PodUid, _: &str) -> Result<ContainerPlacement, String> {
        Ok(ContainerPlacement::default())
    }

    fn created(&self, _: &Pod, _: &str, _: &ContainerId) {}
}
