//! State of the CPU, memory, and topology managers: admission decisions and releases. Pure. Spec 06b §1.6, §2.4, §3.2.

use std::collections::{BTreeMap, HashSet, VecDeque};

use super::settings::PlacementPolicies;
use crate::{
    cpu::{CpuAlignment, CpuAllocation, CpuAllocationError, CpuState, ReusableCpus, StaticPolicy, exclusive_cpus},
    memory::{MachineState, MemoryAllocation, MemoryAllocationError, MemoryBlock, StaticMemoryPolicy, is_pinned},
    numa::{
        NumaMask, ProviderHints, TopologyHint, TopologyPolicy, TopologyScope, explain, hint_lists,
        policy::TopologyAffinityError,
    },
};
use berth_ports::AllocationRefusal;
use berth_types::{CpuSet, Pod, PodRef, PodUid, api};

/// Number of refusals that are remembered for people.
const MAX_REFUSALS: usize = 32;

/// A pod that was refused because its resources could not be aligned or allocated.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlacementRefusal {
    /// Identity, for a pod that may be unknown to others by now.
    pub pod: PodRef,
    /// What was missing, and what would have sufficed.
    pub detail: String,
}

/// What the managers know, for people.
#[derive(Clone, Debug, Default)]
pub struct PlacementSnapshot {
    /// CPUs of containers without exclusive ones; all online CPUs with the policy `none`.
    pub shared: CpuSet,
    /// Exclusive CPUs by pod and container.
    pub exclusive: BTreeMap<PodUid, BTreeMap<String, CpuSet>>,
    /// Memory of the NUMA nodes; `None` with the policy `None` of the memory manager.
    pub memory: Option<MachineState>,
    /// Memory by pod and container.
    pub blocks: BTreeMap<PodUid, BTreeMap<String, Vec<MemoryBlock>>>,
    /// The last refusals, the newest last.
    pub refusals: Vec<PlacementRefusal>,
}

/// Outcome of an allocation, for metrics and checkpoints.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct AllocationOutcome {
    /// NUMA nodes of the container.
    pub affinity: Option<NumaMask>,
    /// Whether the container requests exclusive CPUs.
    pub requests_cpus: bool,
    /// Alignment of newly assigned CPUs.
    pub new_cpus: Option<CpuAlignment>,
    /// Whether the pod's memory is pinned.
    pub requests_memory: bool,
    /// Whether memory was newly assigned.
    pub has_new_memory: bool,
}

/// Failed step of an allocation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum AllocationFailure {
    /// The topology policy refuses the merged hint; the detail explains it.
    Topology(String),
    Cpu(CpuAllocationError),
    Memory(MemoryAllocationError),
}

impl AllocationFailure {
    pub fn refusal(&self) -> AllocationRefusal {
        match self {
            Self::Topology(detail) => AllocationRefusal {
                reason: Some(TopologyAffinityError::REASON),
                message: TopologyAffinityError { detail: detail.clone() }.to_string(),
                detail: Some(detail.clone()),
            },
            Self::Cpu(error) => AllocationRefusal { reason: error.reason(), message: error.to_string(), detail: None },
            Self::Memory(error) => {
                let detail = Some(error.detail()).filter(|detail| !detail.is_empty());
                AllocationRefusal { reason: None, message: error.to_string(), detail: detail.map(str::to_owned) }
            }
        }
    }
}

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct PlacementState {
    pub cpu: CpuState,
    pub reusable: ReusableCpus,
    pub memory: Option<StaticMemoryPolicy>,
    /// CPUs that are offline since the start: not assigned, and not in the shared pool, until they are online again.
    pub offline: CpuSet,
    /// Affinity of the pod that is being admitted, in scope `pod`.
    affinities: BTreeMap<PodUid, TopologyHint>,
    refusals: VecDeque<PlacementRefusal>,
    /// Pods whose admission has begun, and that no published set of active pods has contained yet.
    unpublished: HashSet<PodUid>,
}

impl PlacementState {
    /// The state that the checkpoints describe.
    pub fn restored(cpu: CpuState, memory: Option<StaticMemoryPolicy>) -> Self {
        Self { cpu, memory, ..Self::default() }
    }

    /// In scope `pod`: merges the hints of the whole pod.
    ///
    /// # Errors
    /// The policy refuses the result.
    pub fn begin(
        &mut self,
        policies: &PlacementPolicies,
        pod: &Pod,
        devices: ProviderHints,
    ) -> Result<(), AllocationFailure> {
        self.unpublished.insert(pod.uid().clone());
        let is_merged = policies.topology.policy != TopologyPolicy::None;
        if !is_merged || policies.topology.scope != TopologyScope::Pod {
            return Ok(());
        }
        let cpu = policies
            .cpu
            .as_ref()
            .map(|policy| hints_of_cpu(self.usable(policy).pod_hints(&self.cpu, &self.reusable, pod)));
        let memory = self.memory.as_ref().map(|memory| memory.pod_hints(pod));
        let hint = merge(policies, [Some(devices), cpu, memory])?;
        self.affinities.insert(pod.uid().clone(), hint);
        Ok(())
    }

    /// Allocates CPUs and memory to a container, in scope `container` after merging its hints.
    ///
    /// # Errors
    /// The policy refuses the merged hint, or CPUs or memory are missing. What was allocated before stays until the pod
    /// is released.
    pub fn allocate(
        &mut self,
        policies: &PlacementPolicies,
        pod: &Pod,
        container: &api::Container,
        devices: ProviderHints,
    ) -> Result<AllocationOutcome, AllocationFailure> {
        let hint = self.affinity(policies, pod, container, devices)?;
        let mut outcome = AllocationOutcome { affinity: hint.mask, ..AllocationOutcome::default() };
        if let Some(policy) = &policies.cpu {
            outcome.requests_cpus = exclusive_cpus(pod, container) > 0;
            let policy = self.usable(policy);
            let allocated = policy.allocate(&mut self.cpu, &mut self.reusable, pod, container, hint.mask);
            match allocated.map_err(AllocationFailure::Cpu)? {
                CpuAllocation::Exclusive { alignment, .. } => outcome.new_cpus = Some(alignment),
                CpuAllocation::SharedPool | CpuAllocation::Unchanged(_) => {}
            }
        }
        if let Some(memory) = &mut self.memory {
            outcome.requests_memory = is_pinned(pod);
            let allocated = memory.allocate(pod, container, hint);
            outcome.has_new_memory = allocated.map_err(AllocationFailure::Memory)? == MemoryAllocation::New;
        }
        Ok(outcome)
    }

    /// Remembers a refusal for people.
    pub fn record_refusal(&mut self, pod: &Pod, refusal: &AllocationRefusal) {
        let detail = refusal.detail.clone().unwrap_or_else(|| refusal.message.clone());
        self.refusals.retain(|known| known.pod.uid != *pod.uid());
        self.refusals.push_back(PlacementRefusal { pod: pod.id().clone(), detail });
        if self.refusals.len() > MAX_REFUSALS {
            self.refusals.pop_front();
        }
    }

    /// Releases the resources of a pod. Returns whether CPUs and whether memory were released.
    pub fn release(&mut self, pod: &PodUid) -> (bool, bool) {
        self.affinities.remove(pod);
        self.unpublished.remove(pod);
        let has_cpus = self.cpu.release_pod(pod);
        (has_cpus, self.memory.as_mut().is_some_and(|memory| memory.release_pod(pod)))
    }

    /// As [`Self::retain`] for a set that may be older than the last admissions.
    pub fn retain_published(&mut self, active: &HashSet<PodUid>) -> (bool, bool) {
        self.unpublished.retain(|pod| !active.contains(pod));
        match self.unpublished.is_empty() {
            true => self.retain(active),
            false => self.retain(&active.union(&self.unpublished).cloned().collect()),
        }
    }

    /// Releases the resources of all other pods. Returns whether CPUs and whether memory were released.
    pub fn retain(&mut self, active: &HashSet<PodUid>) -> (bool, bool) {
        self.affinities.retain(|pod, _| active.contains(pod));
        self.unpublished.retain(|pod| active.contains(pod));
        let has_cpus = self.cpu.retain(active);
        (has_cpus, self.memory.as_mut().is_some_and(|memory| memory.retain(active)))
    }

    /// CPUs of containers without exclusive ones.
    pub fn shared(&self) -> CpuSet {
        self.cpu.default.difference(&self.offline)
    }

    /// CPUs that the next container can get exclusively.
    pub fn available(&self, policy: &StaticPolicy) -> CpuSet {
        self.usable(policy).available(&self.cpu)
    }

    /// What is known, for people.
    pub fn snapshot(&self) -> PlacementSnapshot {
        let memory = self.memory.as_ref().map(StaticMemoryPolicy::checkpoint);
        PlacementSnapshot {
            shared: self.shared(),
            exclusive: self.cpu.assignments.clone(),
            memory: memory.map(|checkpoint| checkpoint.machine.clone()),
            blocks: memory.map(|checkpoint| checkpoint.assignments.clone()).unwrap_or_default(),
            refusals: self.refusals.iter().cloned().collect(),
        }
    }

    fn affinity(
        &self,
        policies: &PlacementPolicies,
        pod: &Pod,
        container: &api::Container,
        devices: ProviderHints,
    ) -> Result<TopologyHint, AllocationFailure> {
        let none = TopologyHint { mask: None, is_preferred: false };
        match (policies.topology.policy, policies.topology.scope) {
            (TopologyPolicy::None, _) => Ok(none),
            (_, TopologyScope::Pod) => Ok(self.affinities.get(pod.uid()).copied().unwrap_or(none)),
            (_, TopologyScope::Container) => {
                let cpu = policies.cpu.as_ref().map(|policy| {
                    hints_of_cpu(self.usable(policy).container_hints(&self.cpu, &self.reusable, pod, container))
                });
                let memory = self.memory.as_ref().map(|memory| memory.container_hints(pod, container));
                merge(policies, [Some(devices), cpu, memory])
            }
        }
    }

    /// The policy without CPUs that are offline: they count as reserved.
    fn usable(&self, policy: &StaticPolicy) -> StaticPolicy {
        let mut policy = policy.clone();
        policy.reserved.cpus = policy.reserved.cpus.union(&self.offline);
        policy.reserved.whole_cores = policy.reserved.whole_cores.union(&self.offline);
        policy
    }
}

/// Merges the hints of devices, CPUs, and memory; a manager with the policy `none` is no provider.
fn merge(
    policies: &PlacementPolicies,
    providers: [Option<ProviderHints>; 3],
) -> Result<TopologyHint, AllocationFailure> {
    let providers: Vec<ProviderHints> = providers.into_iter().flatten().collect();
    let lists = hint_lists(&providers);
    let topology = &policies.topology;
    let decision = topology.policy.merge(&lists, &topology.topology);
    if decision.is_admitted {
        return Ok(decision.hint);
    }
    Err(AllocationFailure::Topology(explain(&lists, topology.policy, &topology.topology)))
}

fn hints_of_cpu(hints: Option<Vec<TopologyHint>>) -> ProviderHints {
    hints.map(|hints| ProviderHints::from([("cpu".to_owned(), Some(hints))])).unwrap_or_default()
}
