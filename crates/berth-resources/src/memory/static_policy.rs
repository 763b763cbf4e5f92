//! Static memory policy: hints, allocation, release, validation at the start. Pure. Spec 06b §2.
//!
//! Memory of init containers that end is reused by later containers of the pod. What can be reused follows from the
//! recorded blocks: a container that reuses memory reduces the blocks of the init containers before it. The rest is the
//! amount that the reference counts in addition (the largest block, less what later containers took).

mod pod_memory;

use std::collections::HashSet;

use berth_types::{Pod, PodUid, api, qos::Qos};

use super::{
    checkpoint::MemoryCheckpoint,
    hints::{MemoryRequests, container_requests, new_hints, pod_requests, recorded_hints},
    machine_state::{MachineState, MemoryBlock},
    placement::{MemoryAllocationError, choose_nodes},
    reserved_memory::{MemoryPolicy, ReservedMemory},
};
use crate::{
    numa::{NumaMask, ProviderHints, TopologyHint},
    pod_level::{PodLevelManagement, has_equal_limits, has_pod_level_resources},
    topology::MachineTopology,
};

pub use pod_memory::PodMemoryAllocation;

/// The checkpoint does not fit the machine, the configuration, or itself; the agent does not start. The texts are the
/// reference's.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MemoryStateError {
    /// Containers have memory, but the memory of the machine is missing.
    #[error("[memorymanager] machine state can not be empty when it has memory assignments")]
    EmptyMachine,
    /// A container has memory of a node that the machine lacks.
    #[error(
        "[memorymanager] (pod: {pod}, container: {container}) the memory assignment uses the NUMA that does not exist"
    )]
    UnknownNode {
        /// UID of the pod.
        pod: PodUid,
        /// Name of the container; empty for the memory of a pod.
        container: String,
    },
    /// A container has memory of a type that the node lacks.
    #[error(
        "[memorymanager] (pod: {pod}, container: {container}) the memory assignment uses memory resource that does not \
         exist"
    )]
    UnknownResource {
        /// UID of the pod.
        pod: PodUid,
        /// Name of the container; empty for the memory of a pod.
        container: String,
    },
    /// Sizes, reservations, or assignments differ from those that follow from machine, configuration, and containers.
    #[error("[memorymanager] the expected machine state is different from the real one")]
    Different,
}

/// Result of an allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryAllocation {
    /// The pod's memory is not pinned, see [`StaticMemoryPolicy::pins`].
    NotPinned,
    /// The container keeps what it has.
    Unchanged,
    /// New blocks are recorded: the checkpoint is to be written.
    New,
}

/// Whether a pod gets memory of chosen NUMA nodes without the gate `PodLevelResourceManagers`: it is Guaranteed, and
/// has no pod-level resources.
pub fn is_pinned(pod: &Pod) -> bool {
    Qos::of(pod) == Qos::Guaranteed && !has_pod_level_resources(pod)
}

/// Memory of NUMA nodes, and the containers that have it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StaticMemoryPolicy {
    state: MemoryCheckpoint,
    /// Whether pods with pod-level resources get memory.
    pod_level: PodLevelManagement,
}

impl StaticMemoryPolicy {
    /// An idle machine.
    pub fn new(topology: &MachineTopology, reserved: &ReservedMemory) -> Self {
        let machine = MachineState::initial(topology, reserved);
        let state = MemoryCheckpoint { machine, ..MemoryCheckpoint::new(MemoryPolicy::Static) };
        Self { state, pod_level: PodLevelManagement::Off }
    }

    /// Serves pods with pod-level resources, too; not by default.
    pub fn with_pod_level(self, pod_level: PodLevelManagement) -> Self {
        Self { pod_level, ..self }
    }

    /// Whether the containers of a pod get memory of chosen NUMA nodes. An allocation of such a container counts as a
    /// pinning request.
    pub fn pins(&self, pod: &Pod) -> bool {
        is_pinned(pod) || (self.pod_level.manages(pod) && Qos::of(pod) == Qos::Guaranteed)
    }

    /// Continues from the checkpoint of this policy, which [`MemoryCheckpoint::restore`] returns.
    ///
    /// Deviation: without any entries the state is initialized again, whatever was recorded about the machine. The
    /// reference then refuses to start after each change of the machine's memory.
    ///
    /// # Errors
    /// The checkpoint does not fit.
    pub fn restore(
        topology: &MachineTopology,
        reserved: &ReservedMemory,
        state: MemoryCheckpoint,
    ) -> Result<Self, MemoryStateError> {
        if state.assignments.is_empty() {
            return Ok(Self::new(topology, reserved));
        }
        if state.machine.nodes.is_empty() {
            return Err(MemoryStateError::EmptyMachine);
        }
        let mut expected = MachineState::initial(topology, reserved);
        for (pod, containers) in &state.assignments {
            if let Some(blocks) = state.pods.get(pod).filter(|blocks| !blocks.is_empty()) {
                record(&mut expected, pod, "", blocks)?;
                continue;
            }
            for (container, blocks) in containers {
                record(&mut expected, pod, container, blocks)?;
            }
        }
        if !state.machine.is_equivalent(&expected) {
            return Err(MemoryStateError::Different);
        }
        Ok(Self { state, pod_level: PodLevelManagement::Off })
    }

    /// Content of the checkpoint.
    pub fn checkpoint(&self) -> &MemoryCheckpoint {
        &self.state
    }

    /// Allocatable memory of each node and resource, by node; without those of which there is none.
    pub fn allocatable(&self) -> Vec<MemoryBlock> {
        let nodes = self.state.machine.nodes.iter();
        let blocks = nodes.flat_map(|(id, node)| {
            node.tables.iter().map(move |(resource, table)| MemoryBlock {
                nodes: NumaMask::from_iter([*id]),
                resource: resource.clone(),
                size: table.allocatable,
            })
        });
        blocks.filter(|block| block.size > 0).collect()
    }

    /// Recorded memory of a container; empty if it has none.
    pub fn blocks_of(&self, pod: &PodUid, container: &str) -> &[MemoryBlock] {
        self.recorded(pod, container).map(Vec::as_slice).unwrap_or_default()
    }

    /// NUMA nodes of a container for `cpuset.mems`; empty if it is not restricted.
    pub fn mems_of(&self, pod: &PodUid, container: &str) -> NumaMask {
        self.blocks_of(pod, container).iter().fold(NumaMask::default(), |nodes, block| nodes.union(block.nodes))
    }

    /// Hints for a container: the nodes that it has, or those that can serve it.
    pub fn container_hints(&self, pod: &Pod, container: &api::Container) -> ProviderHints {
        let has_ended = self.has_ended(pod, container);
        let requested = self.requests(pod, container).filter(|_| self.pins(pod) && !has_ended);
        let Some(requested) = requested else { return ProviderHints::new() };
        match self.recorded(pod.uid(), &container.name) {
            Some(blocks) => recorded_hints(blocks, &requested),
            None => new_hints(&self.state.machine, &requested, &self.reusable(pod, &container.name)),
        }
    }

    /// Hints for all containers of a pod together. The first container with recorded memory decides, as in the
    /// reference: unless it has all of the pod's memory there is no preference.
    pub fn pod_hints(&self, pod: &Pod) -> ProviderHints {
        if self.pod_level.manages(pod) {
            return self.whole_pod_hints(pod);
        }
        let requested = pod_requests(pod).filter(|_| is_pinned(pod));
        let Some(requested) = requested.map(|requested| self.known(requested)) else { return ProviderHints::new() };
        let recorded = containers(pod).find_map(|container| self.recorded(pod.uid(), &container.name));
        match recorded {
            Some(blocks) => recorded_hints(blocks, &requested),
            None => new_hints(&self.state.machine, &requested, &[]),
        }
    }

    /// Whether an allocation would give memory to a container.
    pub fn needs_memory(&self, pod: &Pod, container: &api::Container) -> bool {
        let has_memory = self.recorded(pod.uid(), &container.name).is_some() || self.has_ended(pod, container);
        self.pins(pod) && !has_memory && self.requests(pod, container).is_none_or(|requested| !requested.is_empty())
    }

    /// Allocates the memory of a container, on the nodes that the topology manager chose. Containers are allocated in
    /// the order in which they start.
    ///
    /// Deviation: an init container without memory gets none if a later container of the pod has memory. It has ended
    /// before a restart of the agent; the reference allocates again, and refuses the running pod on a full node.
    ///
    /// # Errors
    /// The memory cannot be allocated; nothing has changed.
    pub fn allocate(
        &mut self,
        pod: &Pod,
        container: &api::Container,
        affinity: TopologyHint,
    ) -> Result<MemoryAllocation, MemoryAllocationError> {
        if !self.pins(pod) {
            return Ok(MemoryAllocation::NotPinned);
        }
        if self.recorded(pod.uid(), &container.name).is_some() || self.has_ended(pod, container) {
            return Ok(MemoryAllocation::Unchanged);
        }
        let requested = self.requests(pod, container).ok_or(MemoryAllocationError::Quantity)?;
        // If the class in the API status is not that of the spec, or the pod has pod-level resources. The reference
        // refuses such a container of a pod with pod-level resources under the topology policy `none`.
        if requested.is_empty() {
            return Ok(MemoryAllocation::Unchanged);
        }
        let reusable = self.reusable(pod, &container.name);
        let nodes = choose_nodes(&self.state.machine, &requested, &reusable, affinity)?;
        let mut blocks = Vec::new();
        for (resource, size) in requested {
            let block = MemoryBlock { nodes, resource, size };
            let reused = self.reuse(pod, &container.name, &block);
            self.state.machine.take(&block, size.saturating_sub(reused));
            blocks.push(block);
        }
        let containers = self.state.assignments.entry(pod.uid().clone()).or_default();
        containers.insert(container.name.clone(), blocks);
        Ok(MemoryAllocation::New)
    }

    /// Releases the memory of the init containers that have ended when a container starts: plain ones declared before
    /// it. Returns whether there was any.
    pub fn release_init_before(&mut self, pod: &Pod, container: &str) -> bool {
        let mut is_changed = false;
        // An ephemeral container is after none.
        let has_container = containers(pod).any(|known| known.name == container);
        for init in plain_init_before(pod, container).filter(|_| has_container) {
            is_changed |= self.release(pod.uid(), init);
        }
        is_changed
    }

    /// Releases the memory of a container. Returns whether it had any. The memory of a pod with pod-level resources is
    /// released with its last container.
    pub fn release(&mut self, pod: &PodUid, container: &str) -> bool {
        let Some(containers) = self.state.assignments.get_mut(pod) else { return false };
        let Some(blocks) = containers.remove(container) else { return false };
        let is_last = containers.is_empty();
        if is_last {
            self.state.assignments.remove(pod);
        }
        let released = match self.state.pods.contains_key(pod) {
            true if is_last => self.state.pods.remove(pod).unwrap_or_default(),
            true => Vec::new(),
            false => blocks,
        };
        for block in &released {
            self.state.machine.give_back(block);
        }
        true
    }

    /// Releases the memory of a pod. Returns whether it had any.
    pub fn release_pod(&mut self, pod: &PodUid) -> bool {
        let containers = self.state.assignments.get(pod);
        let names: Vec<String> = containers.into_iter().flat_map(|containers| containers.keys().cloned()).collect();
        for container in &names {
            self.release(pod, container);
        }
        !names.is_empty()
    }

    /// Releases the memory of all pods that are not active. Returns whether there was any.
    pub fn retain(&mut self, active: &HashSet<PodUid>) -> bool {
        let inactive = self.state.assignments.iter().filter(|(pod, _)| !active.contains(*pod));
        let containers = inactive.flat_map(|(pod, all)| all.keys().map(move |name| (pod.clone(), name.clone())));
        let released: Vec<(PodUid, String)> = containers.collect();
        for (pod, container) in &released {
            self.release(pod, container);
        }
        self.state.pods.retain(|pod, _| active.contains(pod));
        !released.is_empty()
    }

    fn recorded(&self, pod: &PodUid, container: &str) -> Option<&Vec<MemoryBlock>> {
        self.state.assignments.get(pod)?.get(container)
    }

    /// Memory requests of a container; `None` if one is not a whole number of bytes. In a pod with pod-level resources
    /// only a container with the same requests and limits has any.
    fn requests(&self, pod: &Pod, container: &api::Container) -> Option<MemoryRequests> {
        if self.pod_level.manages(pod) && !has_equal_limits(container) {
            return Some(MemoryRequests::new());
        }
        container_requests(container).map(|requested| self.known(requested))
    }

    /// Leaves out requests of zero for resources that some node lacks: blocks of them would not pass the validation.
    fn known(&self, mut requested: MemoryRequests) -> MemoryRequests {
        requested.retain(|resource, bytes| *bytes > 0 || self.state.machine.has_resource(resource));
        requested
    }

    /// Whether this is a plain init container without memory, of a pod of which a later container has memory.
    fn has_ended(&self, pod: &Pod, container: &api::Container) -> bool {
        let mut plain_init = pod.init_containers().iter().filter(|init| !Pod::is_sidecar(init));
        let mut later = containers(pod).skip_while(|other| other.name != container.name).skip(1);
        plain_init.any(|init| init.name == container.name)
            && self.recorded(pod.uid(), &container.name).is_none()
            && later.any(|other| self.recorded(pod.uid(), &other.name).is_some())
    }

    /// Blocks that a container can reuse: those of the plain init containers declared before it.
    fn reusable(&self, pod: &Pod, container: &str) -> Vec<MemoryBlock> {
        plain_init_before(pod, container).flat_map(|init| self.blocks_of(pod.uid(), init)).cloned().collect()
    }

    /// Reduces the blocks of earlier init containers on the same nodes by the size of a new block; returns the bytes
    /// that are reused. The blocks then add up to what is reserved.
    fn reuse(&mut self, pod: &Pod, container: &str, block: &MemoryBlock) -> u64 {
        let mut needed = block.size;
        let Some(containers) = self.state.assignments.get_mut(pod.uid()) else { return 0 };
        for init in plain_init_before(pod, container) {
            let earlier = containers.get_mut(init).into_iter().flatten();
            for other in earlier.filter(|other| other.nodes == block.nodes && other.resource == block.resource) {
                let reused = other.size.min(needed);
                other.size = other.size.saturating_sub(reused);
                needed = needed.saturating_sub(reused);
            }
        }
        block.size.saturating_sub(needed)
    }
}

/// Init containers, then regular ones.
fn containers(pod: &Pod) -> impl Iterator<Item = &api::Container> {
    pod.init_containers().iter().chain(pod.containers())
}

/// Names of the init containers that end before a container starts.
fn plain_init_before<'a>(pod: &'a Pod, container: &'a str) -> impl Iterator<Item = &'a str> {
    let before = pod.init_containers().iter().take_while(move |init| init.name != container);
    before.filter(|init| !Pod::is_sidecar(init)).map(|init| init.name.as_str())
}

/// Adds recorded blocks to the expected state of the machine.
fn record(
    expected: &mut MachineState,
    pod: &PodUid,
    container: &str,
    blocks: &[MemoryBlock],
) -> Result<(), MemoryStateError> {
    for block in blocks {
        for id in block.nodes.iter() {
            let (pod, container) = (pod.clone(), container.to_owned());
            let Some(node) = expected.nodes.get(&id) else {
                return Err(MemoryStateError::UnknownNode { pod, container });
            };
            if !node.tables.contains_key(&block.resource) {
                return Err(MemoryStateError::UnknownResource { pod, container });
            }
        }
        expected.take(block, block.size);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
