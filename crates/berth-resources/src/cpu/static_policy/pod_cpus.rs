//! CPUs of pods with pod-level resources: one set, of which containers get parts. Pure. Spec 06b §1.12.

use berth_types::{CpuSet, Pod, api, qos::Qos};

use super::{CpuAlignment, CpuAllocationError, StaticPolicy, exclusive_cpus, whole_cpus};
use crate::{
    cpu::{
        packed_allocator::NotEnoughCpus,
        state::{ContainerCpus, CpuState},
    },
    numa::NumaMask,
    pod_level::{EmptyPodPoolError, check_parts, has_equal_limits, part_requests},
};

/// Result of [`StaticPolicy::allocate_pod`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PodCpuAllocation {
    /// Number of containers with exclusive CPUs.
    pub exclusive: usize,
    /// Number of containers in the pool of the pod.
    pub shared: usize,
    /// Alignment of newly assigned CPUs; `None` if the pod keeps what it has. The checkpoint is to be written.
    pub alignment: Option<CpuAlignment>,
}

impl StaticPolicy {
    /// Number of exclusive CPUs of a container, 0 if it shares CPUs. In a pod with pod-level resources only a container
    /// with the same requests and limits has any, and only with the gate.
    pub fn container_cpus(&self, pod: &Pod, container: &api::Container) -> usize {
        if !self.options.pod_level.manages(pod) {
            return exclusive_cpus(pod, container);
        }
        let is_eligible = Qos::of(pod) == Qos::Guaranteed && has_equal_limits(container);
        if is_eligible { whole_cpus(container.resources.as_ref()) } else { 0 }
    }

    /// Number of CPUs of a pod that has CPUs as a whole: its pod-level request, 0 if that is no whole number.
    pub fn pod_cpus(&self, pod: &Pod) -> usize {
        let is_managed = self.options.pod_level.manages(pod) && Qos::of(pod) == Qos::Guaranteed;
        if is_managed { whole_cpus(pod.spec().resources.as_ref()) } else { 0 }
    }

    /// Checks that the exclusive CPUs of containers leave some of the pod's `count` CPUs for all others.
    ///
    /// # Errors
    /// A container would have no CPUs.
    pub(in crate::cpu) fn check_pod(&self, pod: &Pod, count: usize) -> Result<(), EmptyPodPoolError> {
        let total = u64::try_from(count).unwrap_or(u64::MAX);
        let amount = |container: &api::Container| {
            let own = u64::try_from(self.container_cpus(pod, container)).unwrap_or(u64::MAX);
            Some(own).filter(|own| *own > 0)
        };
        check_parts(total, part_requests(pod, amount)).map_err(EmptyPodPoolError::of_cpus)
    }

    /// Allocates the CPUs of a pod with pod-level resources and divides them among its containers. `affinity` is as for
    /// [`StaticPolicy::allocate`]. A failure changes nothing.
    ///
    /// Deviation: a pod that has CPUs keeps them. The reference allocates again when it admits the pod after a restart.
    ///
    /// # Errors
    /// Too few CPUs are available, the request does not fit whole cores as the options require, or a container would
    /// have no CPUs.
    pub fn allocate_pod(
        &self,
        state: &mut CpuState,
        pod: &Pod,
        affinity: Option<NumaMask>,
    ) -> Result<PodCpuAllocation, CpuAllocationError> {
        let count = self.pod_cpus(pod);
        if count == 0 {
            return Ok(PodCpuAllocation::default());
        }
        let containers = pod.init_containers().iter().chain(pod.containers());
        let (own, others): (Vec<_>, Vec<_>) = containers.partition(|container| self.container_cpus(pod, container) > 0);
        let kept = PodCpuAllocation { exclusive: own.len(), shared: others.len(), alignment: None };
        if state.has_pod(pod.uid()) {
            return Ok(kept);
        }
        self.check_pod(pod, count)?;
        self.check_whole_cores(state, count)?;
        let cpus = self.choose(&self.available(state), count, affinity)?;
        let parts = self.divide(pod, &cpus)?;
        let alignment = self.alignment(&cpus);
        state.assign_pod(pod.uid(), cpus, parts);
        Ok(PodCpuAllocation { alignment: Some(alignment), ..kept })
    }

    /// Divides the CPUs of a pod. An init container that ends runs on all CPUs but those of the sidecars before it, or
    /// on some of these; containers that run until the pod ends have CPUs of their own or share the rest.
    fn divide(&self, pod: &Pod, cpus: &CpuSet) -> Result<ContainerCpus, NotEnoughCpus> {
        let mut parts = ContainerCpus::new();
        let mut pool = cpus.clone();
        for container in pod.init_containers() {
            let (count, is_sidecar) = (self.container_cpus(pod, container), Pod::is_sidecar(container));
            let part = match (count, is_sidecar) {
                (0, true) => continue,
                (0, false) => pool.clone(),
                _ => self.options.take(&self.topology, &pool, count)?,
            };
            if is_sidecar {
                pool = pool.difference(&part);
            }
            parts.insert(container.name.clone(), part);
        }
        for container in pod.containers() {
            let count = self.container_cpus(pod, container);
            if count > 0 {
                let part = self.options.take(&self.topology, &pool, count)?;
                pool = pool.difference(&part);
                parts.insert(container.name.clone(), part);
            }
        }
        for container in pod.init_containers().iter().chain(pod.containers()) {
            parts.entry(container.name.clone()).or_insert_with(|| pool.clone());
        }
        Ok(parts)
    }
}

#[cfg(test)]
mod tests;
