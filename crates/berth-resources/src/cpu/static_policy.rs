//! Static policy of the CPU manager: exclusive CPUs of containers. Pure. Spec 06b §1.5 to §1.7.
//!
//! Deviation from the reference: a container that already has CPUs is not checked against `full-pcpus-only` again. The
//! reference checks first, and refuses it after a restart if the other cores of the node are assigned.

mod pod_cpus;

use std::collections::{BTreeMap, BTreeSet};

use berth_types::{CpuSet, Pod, PodUid, api, qos::Qos, quantity::Amount, resources::CPU};

use super::{
    packed_allocator::NotEnoughCpus,
    policy_options::StaticOptions,
    reserved_cpus::ReservedCpus,
    state::{CpuReservation, CpuState, CpuStateMismatch},
};
use crate::{
    numa::NumaMask,
    pod_level::{EmptyPodPoolError, has_pod_level_resources},
    topology::CpuTopology,
};

pub use pod_cpus::PodCpuAllocation;

/// The policy with what it knows of the machine and the configuration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StaticPolicy {
    /// Online CPUs.
    pub topology: CpuTopology,
    /// CPUs that are never assigned.
    pub reserved: ReservedCpus,
    /// Options of the configuration.
    pub options: StaticOptions,
}

/// CPUs of finished init containers, which later containers of the same pod take first. Not part of the checkpoint:
/// after a restart the admission of the pod's containers, in order, restores it.
///
/// The reference forgets them when another pod is admitted; here pods are admitted side by side.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ReusableCpus(BTreeMap<PodUid, CpuSet>);

/// Result of [`StaticPolicy::allocate`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CpuAllocation {
    /// The container runs on the shared pool.
    SharedPool,
    /// The container keeps the CPUs that it has.
    Unchanged(CpuSet),
    /// The container gets these CPUs; the state is changed, and the checkpoint is to be written.
    Exclusive {
        /// CPUs of the container.
        cpus: CpuSet,
        /// Alignment of the CPUs, for metrics.
        alignment: CpuAlignment,
    },
}

/// Hardware units to which a set of CPUs is aligned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CpuAlignment {
    /// Whether the set consists of whole physical cores.
    pub has_whole_cores: bool,
    /// Whether all CPUs share an uncore cache.
    pub has_one_uncore_cache: bool,
}

/// Reason for which a container gets no CPUs; the texts are the reference's.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CpuAllocationError {
    /// With `full-pcpus-only`: the request would leave threads of a core to others.
    #[error("SMT Alignment Error: requested {requested} cpus not multiple cpus per core = {cpus_per_core}")]
    PartialCore {
        /// Number of CPUs requested.
        requested: usize,
        /// Hardware threads per core.
        cpus_per_core: usize,
    },
    /// With `full-pcpus-only`: too few CPUs of cores without a reserved CPU are free.
    #[error(
        "SMT Alignment Error: not enough free physical CPUs: available physical CPUs = {available}, requested CPUs = \
         {requested}, CPUs per core = {cpus_per_core}"
    )]
    PhysicalCores {
        /// Number of free CPUs of cores without a reserved CPU.
        available: usize,
        /// Number of CPUs requested.
        requested: usize,
        /// Hardware threads per core.
        cpus_per_core: usize,
    },
    /// Too few CPUs are available.
    #[error(transparent)]
    NotEnough(#[from] NotEnoughCpus),
    /// The exclusive CPUs of containers leave none for others of a pod with pod-level resources.
    #[error(transparent)]
    EmptyPodPool(#[from] EmptyPodPoolError),
}

impl CpuAllocationError {
    /// Reason of the pod's status; `None` for `UnexpectedAdmissionError`, whose message wraps the text.
    pub fn reason(&self) -> Option<&'static str> {
        match self {
            Self::PartialCore { .. } | Self::PhysicalCores { .. } => Some("SMTAlignmentError"),
            Self::EmptyPodPool(_) => Some(EmptyPodPoolError::REASON),
            Self::NotEnough(_) => None,
        }
    }
}

/// Number of exclusive CPUs of a container: the whole CPUs that it requests in a Guaranteed pod without pod-level
/// resources; 0 if it runs on the shared pool.
pub fn exclusive_cpus(pod: &Pod, container: &api::Container) -> usize {
    if Qos::of(pod) != Qos::Guaranteed || has_pod_level_resources(pod) {
        return 0;
    }
    whole_cpus(container.resources.as_ref())
}

/// Requested number of CPUs; 0 if there is no request, or it is no whole number.
fn whole_cpus(resources: Option<&api::ResourceRequirements>) -> usize {
    let quantity = resources.and_then(|resources| resources.requests.as_ref()?.get(CPU));
    let Some(request) = quantity.and_then(|quantity| Amount::try_from(quantity).ok()) else { return 0 };
    let is_whole = request.value().checked_mul(1000) == Some(request.milli());
    if is_whole { usize::try_from(request.value()).unwrap_or(0) } else { 0 }
}

/// Number of exclusive CPUs that a pod has at most at one time.
pub fn pod_exclusive_cpus(pod: &Pod) -> usize {
    // Absurd requests must not overflow: they are refused later, because no machine has as many CPUs.
    let (mut init, mut sidecars) = (0_usize, 0_usize);
    for container in pod.init_containers() {
        let count = sidecars.saturating_add(exclusive_cpus(pod, container));
        match Pod::is_sidecar(container) {
            true => sidecars = count,
            false => init = init.max(count),
        }
    }
    let regular = pod.containers().iter().map(|container| exclusive_cpus(pod, container));
    init.max(regular.fold(sidecars, usize::saturating_add))
}

/// Whether a container is an init container that ends before the next container starts.
fn is_plain_init(pod: &Pod, name: &str) -> bool {
    pod.init_containers().iter().any(|container| container.name == name && !Pod::is_sidecar(container))
}

/// CPUs of plain init containers of a pod that no other container of the pod has.
///
/// Reuse is limited to them, so that CPUs which the pod has lost, or which a container that runs until the pod ends has
/// in the checkpoint, are never assigned again.
fn init_cpus(state: &CpuState, pod: &Pod) -> CpuSet {
    let containers = state.assignments.get(pod.uid()).into_iter().flatten();
    let (init, other): (Vec<_>, Vec<_>) = containers.partition(|(name, _)| is_plain_init(pod, name));
    let union = |list: Vec<(&String, &CpuSet)>| list.into_iter().flat_map(|(_, cpus)| cpus.iter()).collect::<CpuSet>();
    union(init).difference(&union(other))
}

impl StaticPolicy {
    /// Fills the shared pool of a fresh state, or validates a restored one. Returns whether the state is changed.
    ///
    /// # Errors
    /// The state does not fit the machine or the configuration.
    pub fn initialize(&self, state: &mut CpuState) -> Result<bool, CpuStateMismatch> {
        let strict = self.options.strict_reservation;
        let reservation = if strict { CpuReservation::Strict } else { CpuReservation::Shared };
        state.initialize(&self.topology.all(), &self.reserved.cpus, reservation)
    }

    /// CPUs that containers can get exclusively while none is assigned.
    pub fn allocatable(&self) -> CpuSet {
        self.topology.all().difference(&self.reserved.cpus)
    }

    /// CPUs that the next container can get exclusively.
    pub fn available(&self, state: &CpuState) -> CpuSet {
        state.default.difference(&self.reserved.cpus)
    }

    /// Allocates the exclusive CPUs of a container. `affinity` is the topology manager's choice of NUMA nodes: CPUs of
    /// these nodes are taken first, then others. Containers of a pod are allocated in their order. A failure changes
    /// nothing.
    ///
    /// # Errors
    /// Too few CPUs are available, or the request does not fit whole cores as the options require.
    pub fn allocate(
        &self,
        state: &mut CpuState,
        reusable: &mut ReusableCpus,
        pod: &Pod,
        container: &api::Container,
        affinity: Option<NumaMask>,
    ) -> Result<CpuAllocation, CpuAllocationError> {
        let count = self.container_cpus(pod, container);
        if count == 0 {
            return Ok(CpuAllocation::SharedPool);
        }
        let (uid, name) = (pod.uid(), container.name.as_str());
        let allocation = match state.container(uid, name) {
            Some(cpus) => CpuAllocation::Unchanged(cpus.clone()),
            None => {
                self.check_whole_cores(state, count)?;
                let reused = reusable.of(uid).intersection(&init_cpus(state, pod));
                let cpus = self.choose(&self.available(state).union(&reused), count, affinity)?;
                state.assign(uid, name, cpus.clone());
                CpuAllocation::Exclusive { alignment: self.alignment(&cpus), cpus }
            }
        };
        if let CpuAllocation::Unchanged(cpus) | CpuAllocation::Exclusive { cpus, .. } = &allocation {
            match is_plain_init(pod, name) {
                true => reusable.insert(uid, cpus),
                false => reusable.remove(uid, cpus),
            }
        }
        Ok(allocation)
    }

    fn check_whole_cores(&self, state: &CpuState, requested: usize) -> Result<(), CpuAllocationError> {
        if !self.options.full_cores_only {
            return Ok(());
        }
        let cpus_per_core = self.topology.cpus_per_core();
        if requested.checked_rem(cpus_per_core).is_some_and(|rest| rest != 0) {
            return Err(CpuAllocationError::PartialCore { requested, cpus_per_core });
        }
        // Siblings of reserved CPUs are left out; otherwise the allocator would take single threads of their cores.
        let available = state.default.difference(&self.reserved.whole_cores).len();
        if requested > available {
            return Err(CpuAllocationError::PhysicalCores { available, requested, cpus_per_core });
        }
        Ok(())
    }

    /// Chooses CPUs: those of the mask first, then others.
    fn choose(&self, candidates: &CpuSet, count: usize, affinity: Option<NumaMask>) -> Result<CpuSet, NotEnoughCpus> {
        let mut cpus = CpuSet::default();
        if let Some(mask) = affinity {
            let aligned = candidates.intersection(&self.cpus_of_mask(mask));
            cpus = self.options.take(&self.topology, &aligned, count.min(aligned.len()))?;
        }
        let missing = count.saturating_sub(cpus.len());
        let others = self.options.take(&self.topology, &candidates.difference(&cpus), missing)?;
        Ok(cpus.union(&others))
    }

    /// CPUs of the nodes of a mask; with `align-by-socket` those of all sockets of these nodes.
    fn cpus_of_mask(&self, mask: NumaMask) -> CpuSet {
        if !self.options.aligns_by_socket {
            return self.topology.select(|info| mask.contains(info.node));
        }
        let infos = self.topology.cpus.values().filter(|info| mask.contains(info.node));
        let sockets: BTreeSet<u32> = infos.map(|info| info.socket).collect();
        self.topology.select(|info| sockets.contains(&info.socket))
    }

    /// Alignment of a set of online CPUs; an empty set is aligned to everything.
    pub fn alignment(&self, cpus: &CpuSet) -> CpuAlignment {
        let topology = &self.topology.cpus;
        let infos = || cpus.iter().filter_map(move |cpu| topology.get(&cpu));
        let cores: BTreeSet<u32> = infos().map(|info| info.core).collect();
        let caches: BTreeSet<u32> = infos().map(|info| info.uncore_cache).collect();
        let whole_cores = self.topology.select(|info| cores.contains(&info.core));
        CpuAlignment { has_whole_cores: whole_cores.is_subset(cpus), has_one_uncore_cache: caches.len() <= 1 }
    }
}

impl ReusableCpus {
    /// CPUs that a container of the pod can take again.
    pub fn of(&self, pod: &PodUid) -> CpuSet {
        self.0.get(pod).cloned().unwrap_or_default()
    }

    /// Forgets the CPUs of all pods that are not active.
    pub fn retain(&mut self, is_active: impl Fn(&PodUid) -> bool) {
        self.0.retain(|pod, _| is_active(pod));
    }

    /// Adds the CPUs of a plain init container.
    pub(super) fn insert(&mut self, pod: &PodUid, cpus: &CpuSet) {
        self.0.insert(pod.clone(), self.of(pod).union(cpus));
    }

    /// Removes the CPUs of a container that runs until the pod ends.
    fn remove(&mut self, pod: &PodUid, cpus: &CpuSet) {
        let rest = self.of(pod).difference(cpus);
        match rest.is_empty() {
            true => self.0.remove(pod),
            false => self.0.insert(pod.clone(), rest),
        };
    }
}

#[cfg(test)]
mod simulation_tests;
#[cfg(test)]
mod tests;
