//! CPUs and memory nodes of containers: the port of container creation and of pod-resources.

use std::time::Duration;

use async_trait::async_trait;
use tokio::time::timeout;
use tracing::warn;

use super::manager::{AppliedContainer, PlacementManager};
use crate::memory::MemoryBlock;
use berth_ports::{AllocatablePlacement, ContainerPlacement, ContainerPlacements, PlacedMemory};
use berth_types::{ContainerId, Pod, PodUid};

/// How long the creation of a container waits until running containers have left its CPUs. A runtime that hangs must
/// not delay pods longer; the reconciler repeats the update.
const POOL_UPDATE: Duration = Duration::from_secs(2);

#[async_trait]
impl ContainerPlacements for PlacementManager {
    fn placement(&self, pod: &PodUid, container: &str) -> ContainerPlacement {
        let state = self.state();
        let memory_nodes = state.memory.as_ref().map(|memory| memory.mems_of(pod, container).to_string());
        let memory_nodes = memory_nodes.unwrap_or_default();
        if self.policies.cpu.is_none() {
            return ContainerPlacement { memory_nodes, ..ContainerPlacement::default() };
        }
        let own = state.cpu.container(pod, container);
        ContainerPlacement {
            cpus: own.cloned().unwrap_or_else(|| state.shared()),
            has_exclusive_cpus: own.is_some(),
            memory_nodes,
        }
    }

    fn runs_without_quota(&self, pod: &Pod, container: &str) -> bool {
        let Some(policy) = self.policies.cpu.as_ref().filter(|_| self.policies.disables_cpu_quota) else {
            return false;
        };
        // In the pool of a pod with pod-level resources the quota keeps containers off what others have.
        let is_in_pool = self.policies.pod_level.manages(pod)
            && pod.container(container).is_none_or(|(_, container)| policy.container_cpus(pod, container) == 0);
        !is_in_pool && self.state().cpu.container(pod.uid(), container).is_some()
    }

    fn pod_runs_without_quota(&self, pod: &Pod) -> bool {
        if !self.policies.pod_level.manages(pod) {
            return self.policies.disables_cpu_quota && self.state().cpu.assignments.contains_key(pod.uid());
        }
        let mut containers = pod.init_containers().iter().chain(pod.containers());
        containers.any(|container| self.runs_without_quota(pod, &container.name))
    }

    fn memory(&self, pod: &PodUid, container: &str) -> Vec<PlacedMemory> {
        let state = self.state();
        let blocks = state.memory.as_ref().map(|memory| memory.blocks_of(pod, container));
        blocks.into_iter().flatten().map(placed).collect()
    }

    fn allocatable(&self) -> AllocatablePlacement {
        let state = self.state();
        AllocatablePlacement {
            cpus: self.policies.cpu.as_ref().map(|policy| policy.allocatable()).unwrap_or_default(),
            memory: state.memory.iter().flat_map(|memory| memory.allocatable()).map(|block| placed(&block)).collect(),
        }
    }

    fn refusal(&self, pod: &PodUid) -> Option<String> {
        PlacementManager::refusal(self, pod)
    }

    async fn prepare(&self, pod: &PodUid, container: &str) -> Result<ContainerPlacement, String> {
        // Only what this pod got since the start must be written: other containers start on a full disk, too.
        let unsaved = self.unsaved().get(pod).copied().unwrap_or_default();
        self.cpu_checkpoint.saved(unsaved.cpu).await?;
        self.memory_checkpoint.saved(unsaved.memory).await?;
        if self.placement(pod, container).has_exclusive_cpus {
            let number = *self.changes.borrow();
            let mut reconciled = self.reconciled.subscribe();
            if timeout(POOL_UPDATE, reconciled.wait_for(|done| *done >= number)).await.is_err() {
                warn!(podUID = %pod, containerName = container, "Containers of the shared pool still run on the exclusive CPUs of this container");
            }
        }
        let placement = self.placement(pod, container);
        if self.policies.cpu.is_some() {
            if placement.cpus.is_empty() {
                warn!(podUID = %pod, containerName = container, "The shared pool has no CPUs: the container runs on all CPUs");
            }
            self.applied().prepared.insert((pod.clone(), container.to_owned()), placement.cpus.clone());
        }
        Ok(placement)
    }

    fn created(&self, pod: &Pod, container: &str, id: &ContainerId) {
        let (uid, name) = (pod.uid().clone(), container.to_owned());
        let prepared = self.applied().prepared.remove(&(uid.clone(), name.clone()));
        if let Some(cpus) = prepared {
            let created = AppliedContainer { pod: uid, name, cpus: cpus.clone(), is_observed: false };
            let mut applied = self.applied();
            // One that was created before, and never observed running, is gone.
            applied.containers.retain(|_, old| old.is_observed || old.pod != created.pod || old.name != created.name);
            applied.containers.insert(id.clone(), created);
            drop(applied);
            if cpus != self.placement(pod.uid(), container).cpus {
                // The pool changed while the runtime created the container.
                self.pool_changed();
            }
        }
        let has_freed = self.state().memory.as_mut().is_some_and(|memory| memory.release_init_before(pod, container));
        if has_freed {
            self.memory_checkpoint.request();
        }
    }
}

fn placed(block: &MemoryBlock) -> PlacedMemory {
    PlacedMemory {
        resource: block.resource.clone(),
        bytes: block.size,
        nodes: block.nodes.iter().map(i64::from).collect(),
    }
}
