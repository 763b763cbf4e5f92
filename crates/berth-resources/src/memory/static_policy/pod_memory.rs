//! Memory of pods with pod-level resources: blocks of the pod, of which containers get parts. Pure. Spec 06b §1.12.

use std::collections::BTreeMap;

use berth_types::{
    Pod,
    quantity::Amount,
    resources::{MEMORY, is_hugepage},
};

use super::{StaticMemoryPolicy, containers};
use crate::{
    memory::{
        hints::{MemoryRequests, new_hints, recorded_hints},
        machine_state::{MemoryBlock, whole_bytes},
        placement::{MemoryAllocationError, choose_nodes},
    },
    numa::{NumaMask, ProviderHints, TopologyHint},
    pod_level::{EmptyPodPoolError, check_parts, has_equal_limits, part_requests},
};

/// Result of [`StaticMemoryPolicy::allocate_pod`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PodMemoryAllocation {
    /// Number of pinning requests: the pod, its init containers, and its other containers with memory of their own.
    pub requests: usize,
    /// Number of containers with memory of their own.
    pub exclusive: usize,
    /// Number of containers in the pool of the pod.
    pub shared: usize,
    /// Whether blocks are newly recorded: the checkpoint is to be written.
    pub is_new: bool,
}

impl StaticMemoryPolicy {
    /// Whether [`Self::allocate_pod`] would give memory to a pod.
    pub fn needs_pod_memory(&self, pod: &Pod) -> bool {
        !self.has_pod(pod) && self.pod_level_requests(pod).is_some_and(|requested| !requested.is_empty())
    }

    /// Allocates the memory of a pod with pod-level resources, and divides it among its containers. `affinity` is as
    /// for [`StaticMemoryPolicy::allocate`].
    ///
    /// Deviation: a pod that has memory keeps it. The reference allocates again when it admits the pod after a restart.
    ///
    /// # Errors
    /// The memory cannot be allocated, or a container would have none; nothing has changed.
    pub fn allocate_pod(
        &mut self,
        pod: &Pod,
        affinity: TopologyHint,
    ) -> Result<PodMemoryAllocation, MemoryAllocationError> {
        let requested = self.pod_level_requests(pod).filter(|requested| !requested.is_empty());
        let Some(requested) = requested else { return Ok(PodMemoryAllocation::default()) };
        let (own, others): (Vec<_>, Vec<_>) = containers(pod).partition(|container| has_equal_limits(container));
        let of_regular = pod.containers().iter().filter(|container| has_equal_limits(container)).count();
        let kept = PodMemoryAllocation {
            requests: pod.init_containers().len().saturating_add(of_regular).saturating_add(1),
            exclusive: own.len(),
            shared: others.len(),
            is_new: false,
        };
        if self.has_pod(pod) {
            return Ok(kept);
        }
        self.check_pod(pod, &requested)?;
        let nodes = choose_nodes(&self.state.machine, &requested, &[], affinity)?;
        let parts = self.divide(pod, nodes, &requested)?;
        let blocks = blocks(nodes, &requested);
        for block in &blocks {
            self.state.machine.take(block, block.size);
        }
        self.state.assignments.insert(pod.uid().clone(), parts);
        self.state.pods.insert(pod.uid().clone(), blocks);
        Ok(PodMemoryAllocation { is_new: true, ..kept })
    }

    /// Hints for a pod with pod-level resources. A pod whose containers leave nothing for others has an empty list for
    /// each resource.
    ///
    /// Deviation: recorded blocks of the pod are its hints. The reference compares those of its first container with
    /// the request of the pod, and has no preference.
    pub(super) fn whole_pod_hints(&self, pod: &Pod) -> ProviderHints {
        let Some(requested) = self.pod_level_requests(pod) else { return ProviderHints::new() };
        if self.check_pod(pod, &requested).is_err() {
            return requested.into_keys().map(|resource| (resource, Some(Vec::new()))).collect();
        }
        match self.state.pods.get(pod.uid()) {
            Some(blocks) => recorded_hints(blocks, &requested),
            None => new_hints(&self.state.machine, &requested, &[]),
        }
    }

    /// Whether a pod or one of its containers has memory.
    fn has_pod(&self, pod: &Pod) -> bool {
        self.state.pods.contains_key(pod.uid()) || self.state.assignments.contains_key(pod.uid())
    }

    /// Pod-level requests of memory and huge pages above zero; `None` if the pod gets no memory as a whole, or if a
    /// request is not a whole number of bytes.
    fn pod_level_requests(&self, pod: &Pod) -> Option<MemoryRequests> {
        let level = pod.spec().resources.as_ref().filter(|_| self.pod_level.manages(pod) && self.pins(pod))?;
        let memory = level.requests.iter().flatten().filter(|(name, _)| *name == MEMORY || is_hugepage(name));
        let requests: Option<MemoryRequests> = memory
            .map(|(name, quantity)| Some((name.clone(), whole_bytes(Amount::try_from(quantity).ok()?)?)))
            .collect();
        let mut requests = requests?;
        requests.retain(|_, bytes| *bytes > 0);
        Some(requests)
    }

    /// Checks that the memory of containers leaves some of the pod's for all others.
    fn check_pod(&self, pod: &Pod, requested: &MemoryRequests) -> Result<(), EmptyPodPoolError> {
        for (resource, total) in requested {
            // A malformed request is refused by the allocation.
            let requests = part_requests(pod, |container| {
                let own = self.requests(pod, container).unwrap_or_default();
                has_equal_limits(container).then(|| own.get(resource).copied().unwrap_or(0))
            });
            check_parts(*total, requests).map_err(|conflict| EmptyPodPoolError::of_memory(conflict, resource))?;
        }
        Ok(())
    }

    /// Divides the memory of a pod, as its CPUs are divided: an init container that ends has its own or all but that of
    /// the sidecars before it; containers that run until the pod ends have memory of their own or share the rest.
    fn divide(
        &self,
        pod: &Pod,
        nodes: NumaMask,
        requested: &MemoryRequests,
    ) -> Result<BTreeMap<String, Vec<MemoryBlock>>, MemoryAllocationError> {
        let mut parts = BTreeMap::new();
        let mut pool = requested.clone();
        for container in pod.init_containers() {
            let own = self.requests(pod, container).ok_or(MemoryAllocationError::Quantity)?;
            let is_sidecar = Pod::is_sidecar(container);
            let part = match (has_equal_limits(container), is_sidecar) {
                (true, _) => blocks(nodes, &own),
                (false, true) => continue,
                (false, false) => blocks(nodes, &pool),
            };
            if is_sidecar {
                subtract(&mut pool, &own);
            }
            parts.insert(container.name.clone(), part);
        }
        for container in pod.containers().iter().filter(|container| has_equal_limits(container)) {
            let own = self.requests(pod, container).ok_or(MemoryAllocationError::Quantity)?;
            subtract(&mut pool, &own);
            parts.insert(container.name.clone(), blocks(nodes, &own));
        }
        for container in containers(pod) {
            parts.entry(container.name.clone()).or_insert_with(|| blocks(nodes, &pool));
        }
        Ok(parts)
    }
}

/// A block for each resource of which there is any.
fn blocks(nodes: NumaMask, requests: &MemoryRequests) -> Vec<MemoryBlock> {
    let requests = requests.iter().filter(|(_, bytes)| **bytes > 0);
    requests.map(|(resource, bytes)| MemoryBlock { nodes, resource: resource.clone(), size: *bytes }).collect()
}

fn subtract(pool: &mut MemoryRequests, part: &MemoryRequests) {
    for (resource, bytes) in pool {
        *bytes = bytes.saturating_sub(part.get(resource).copied().unwrap_or(0));
    }
}

#[cfg(test)]
mod tests;
