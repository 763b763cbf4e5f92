//! Port of the PodResources API: devices, CPUs, memory, and claims allocated exclusively to containers.
//!
//! A resource without a manager is reported as none.
//! Implements spec 04b §12.

use async_trait::async_trait;

use berth_types::{CpuSet, Pod};

/// Device of a device plugin, allocated or allocatable.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Device {
    /// Extended resource of the device, e.g. `example.com/gpu`.
    pub resource: String,
    /// ID that the device plugin assigned.
    pub id: String,
    /// NUMA nodes of the device; empty where the plugin reports none.
    pub nodes: Vec<i64>,
}

/// Memory of one type, with the NUMA nodes it is allocated from.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MemoryBlock {
    /// Memory type: `memory`, `hugepages-2Mi`, …
    pub kind: String,
    /// Size in bytes.
    pub bytes: u64,
    /// NUMA node IDs.
    pub nodes: Vec<i64>,
}

/// Resource claim used by a container.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Claim {
    /// Name of the `ResourceClaim`.
    pub name: String,
    /// Namespace of the `ResourceClaim`.
    pub namespace: String,
    /// Devices allocated to the claim.
    pub devices: Vec<ClaimDevice>,
}

/// Device allocated to a claim.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ClaimDevice {
    /// Qualified CDI names of this device only.
    pub cdi: Vec<String>,
    /// DRA driver name.
    pub driver: String,
    /// Pool name.
    pub pool: String,
    /// Device name.
    pub device: String,
    /// ID of the share, where several claims may share the device.
    pub share_id: Option<String>,
}

/// Resources allocated exclusively to one container.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ExclusiveAllocations {
    /// Devices of device plugins.
    pub devices: Vec<Device>,
    /// Exclusive CPUs; empty for a container on the shared pool.
    pub cpus: CpuSet,
    /// Memory blocks, where memory is allocated by NUMA node.
    pub memory: Vec<MemoryBlock>,
}

/// Resources that can be allocated exclusively.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Allocatable {
    /// Healthy devices of all resources.
    pub devices: Vec<Device>,
    /// CPUs that are not reserved; empty without the static policy.
    pub cpus: CpuSet,
    /// Allocatable memory blocks.
    pub memory: Vec<MemoryBlock>,
}

/// Read access to exclusive allocations. Results are snapshots.
#[async_trait]
pub trait ExclusiveResources: Send + Sync + 'static {
    /// Releases allocations of terminated pods; called before every list.
    async fn reconcile(&self);
    /// Resources allocated to a container.
    fn allocations(&self, pod: &Pod, container: &str) -> ExclusiveAllocations;
    /// Resource claims used by a container.
    ///
    /// # Errors
    /// Why the claims are unknown; the response then lists none.
    fn claims(&self, pod: &Pod, container: &str) -> Result<Vec<Claim>, String>;
    /// Resources that can be allocated.
    fn allocatable(&self) -> Allocatable;
}
