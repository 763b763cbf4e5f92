//! What the pod-resources socket asks about resources that belong to one container alone.
//!
//! Whoever hands out exclusive CPUs, memory, devices and claims answers; nobody does yet, and
//! what nobody has is reported as nothing. Behaviour: spec 04b §12.

use std::collections::BTreeSet;

use async_trait::async_trait;

use berth_types::Pod;

/// A device, or one of them that could be given away.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Device {
    /// The resource it is an instance of, e.g. `example.com/gpu`.
    pub resource: String,
    /// The plugin's id of it.
    pub id: String,
    /// The NUMA nodes it is near; empty where the plugin told none.
    pub nodes: Vec<i64>,
}

/// Memory of one kind on the NUMA nodes it was taken from.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MemoryBlock {
    /// `memory`, `hugepages-2Mi`, …
    pub kind: String,
    /// Bytes.
    pub bytes: u64,
    /// NUMA nodes.
    pub nodes: Vec<i64>,
}

/// A resource claim that a container uses.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Claim {
    /// Name of the `ResourceClaim`.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// What was allocated to it.
    pub devices: Vec<ClaimDevice>,
}

/// A device of a claim.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ClaimDevice {
    /// CDI names of this device alone.
    pub cdi: Vec<String>,
    /// Driver.
    pub driver: String,
    /// Pool.
    pub pool: String,
    /// Device.
    pub device: String,
    /// Which share of a device that several claims may use.
    pub share_id: Option<String>,
}

/// What one container has for itself.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Held {
    /// Devices.
    pub devices: Vec<Device>,
    /// Exclusive CPUs; empty for a container on the shared pool.
    pub cpus: BTreeSet<u32>,
    /// Memory, where it is allocated by NUMA node.
    pub memory: Vec<MemoryBlock>,
}

/// What could be given to containers alone.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Allocatable {
    /// Healthy devices of all resources.
    pub devices: Vec<Device>,
    /// CPUs.
    pub cpus: BTreeSet<u32>,
    /// Memory.
    pub memory: Vec<MemoryBlock>,
}

/// Who knows what belongs to one container alone. Answers are snapshots.
#[async_trait]
pub trait ExclusiveResources: Send + Sync + 'static {
    /// Lets go of what pods that are gone had; asked before every list.
    async fn reconcile(&self);
    /// What a container has.
    fn held(&self, pod: &Pod, container: &str) -> Held;
    /// The claims a container uses.
    ///
    /// # Errors
    /// Why they are not known; the answer then has none.
    fn claims(&self, pod: &Pod, container: &str) -> Result<Vec<Claim>, String>;
    /// What could be given away.
    fn allocatable(&self) -> Allocatable;
}
