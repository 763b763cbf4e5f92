//! Hook of the device manager: CPUs and memory are allocated to a container together with its devices.

use std::{collections::HashSet, time::Duration};

use crate::numa::{NumaMask, ProviderHints};
use berth_ports::AllocationRefusal;
use berth_types::{Pod, PodUid, api};

/// Topology manager with the CPU and memory managers, as the device manager calls it (spec 06b §3.2). The calls are
/// pure decisions in memory: none of them waits.
pub trait ResourceAlignment: Send + Sync + 'static {
    /// Whether hints of devices are merged: the topology policy is not `none`.
    fn merges_hints(&self) -> bool;

    /// Releases the resources of all pods that are neither active nor the candidate of an admission.
    fn retain(&self, active: HashSet<PodUid>, candidate: &PodUid);

    /// Whether all containers of a pod have the CPUs and memory that they request: a running pod is not judged again.
    fn is_allocated(&self, pod: &Pod) -> bool;

    /// Begins the admission of a pod. `hints` are those of the pod's devices, which only the scope `pod` uses.
    ///
    /// # Errors
    /// The pod's resources cannot be aligned.
    fn begin(&self, pod: &Pod, hints: &dyn Fn() -> ProviderHints) -> Result<(), AllocationRefusal>;

    /// Allocates CPUs and memory to a container; `hints` are those of its devices. Returns the NUMA nodes from which
    /// its devices should come, `None` for no preference. A container that has its resources keeps them.
    ///
    /// # Errors
    /// The resources are not available, or cannot be aligned.
    fn allocate(
        &self,
        pod: &Pod,
        container: &api::Container,
        hints: &dyn Fn() -> ProviderHints,
    ) -> Result<Option<NumaMask>, AllocationRefusal>;

    /// Counts an admission that has ended: how long it took, including calls of device plugins, and whether it was
    /// refused.
    fn admission_ended(&self, took: Duration, is_refused: bool);

    /// Releases all resources of a pod.
    fn release(&self, pod: &PodUid);
}

/// No CPU, memory, or topology manager: devices are allocated from all NUMA nodes.
#[derive(Clone, Copy, Debug)]
pub struct NoAlignment;

impl ResourceAlignment for NoAlignment {
    fn merges_hints(&self) -> bool {
        false
    }

    fn retain(&self, _: HashSet<PodUid>, _: &PodUid) {}

    fn is_allocated(&self, _: &Pod) -> bool {
        true
    }

    fn begin(&self, _: &Pod, _: &dyn Fn() -> ProviderHints) -> Result<(), AllocationRefusal> {
        Ok(())
    }

    fn allocate(
        &self,
        _: &Pod,
        _: &api::Container,
        _: &dyn Fn() -> ProviderHints,
    ) -> Result<Option<NumaMask>, AllocationRefusal> {
        Ok(None)
    }

    fn admission_ended(&self, _: Duration, _: bool) {}

    fn release(&self, _: &PodUid) {}
}
