//! State of the CPU, memory, and topology managers: admission and release. Pure. Spec 06b §3.2.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashSet, VecDeque},
};

use super::settings::PlacementPolicies;
use crate::{
    cpu::{CpuAlignment, CpuAllocation, CpuAllocationError, CpuState, PodCpuAllocation, ReusableCpus, StaticPolicy},
    memory::{
        MachineState, MemoryAllocation, MemoryAllocationError, MemoryBlock, PodMemoryAllocation, StaticMemoryPolicy,
    },
    numa::{
        NumaMask, ProviderHints, TopologyHint, TopologyPolicy, TopologyScope, explain, hint_lists,
        policy::TopologyAffinityError,
    },
};
use berth_ports::AllocationRefusal;
use berth_types::{CpuSet, Pod, PodRef, PodUid, api};

/// Most refusals that `/debug/topology` shows.
const MAX_REFUSALS: usize = 32;

/// A pod that was refused because its resources could not be aligned or allocated.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlacementRefusal {
    /// Identity, for a pod that may be unknown to others by now.
    pub pod: PodRef,
    /// What was missing, and what would have sufficed.
    pub detail: String,
}

/// Assignments and last refusals, for `/debug/topology` and `berth why`.
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
    /// Number of memory blocks newly assigned to a container.
    pub new_blocks: usize,
    /// Parts of the containers of a pod that has CPUs as a whole.
    pub cpu_parts: PodCpuAllocation,
    /// Parts of the containers of a pod that has memory as a whole.
    pub memory_parts: PodMemoryAllocation,
}

/// Failed step of an allocation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum AllocationFailure {
    /// The topology policy refuses the merged hint.
    Topology {
        /// Text of the reference.
        text: String,
        /// Explains the refusal.
        detail: String,
    },
    Cpu(CpuAllocationError),
    Memory(MemoryAllocationError),
}

impl AllocationFailure {
    pub fn refusal(&self) -> AllocationRefusal {
        match self {
            Self::Topology { text, detail } => AllocationRefusal {
                reason: Some(TopologyAffinityError::REASON),
                message: text.clone(),
                detail: Some(detail.clone()),
            },
            Self::Cpu(error) => AllocationRefusal { reason: error.reason(), message: error.to_string(), detail: None },
            Self::Memory(error) => {
                let detail = Some(error.detail()).filter(|detail| !detail.is_empty());
                let detail = detail.map(str::to_owned);
                AllocationRefusal { reason: error.reason(), message: error.to_string(), detail }
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

    /// In scope `pod`: merges the hints of the whole pod and allocates CPUs and memory to all its containers, so that
    /// no other pod takes them meanwhile. Returns an outcome per container that was allocated, or one for a pod that
    /// has CPUs and memory as a whole.
    pub fn begin(
        &mut self,
        policies: &PlacementPolicies,
        pod: &Pod,
        devices: ProviderHints,
    ) -> (Vec<AllocationOutcome>, Result<(), AllocationFailure>) {
        self.unpublished.insert(pod.uid().clone());
        self.affinities.remove(pod.uid());
        let is_merged = policies.topology.policy != TopologyPolicy::None;
        let mut outcomes = Vec::new();
        if !is_merged || policies.topology.scope != TopologyScope::Pod {
            return (outcomes, Ok(()));
        }
        let cpu = policies.cpu.as_ref().map(|policy| {
            let policy = self.usable(policy);
            hints_of_cpu(policy.pod_hints(&self.cpu, &self.reusable, pod))
        });
        let memory = self.memory.as_ref().map(|memory| memory.pod_hints(pod));
        let hint = match merge(policies, pod, [Some(devices), cpu, memory]) {
            Ok(hint) => hint,
            Err(failure) => return (outcomes, Err(failure)),
        };
        let is_whole = policies.serves_as_whole(pod);
        if is_whole {
            let (outcome, allocated) = self.allocate_whole(policies, pod, hint);
            outcomes.push(outcome);
            if allocated.is_err() {
                return (outcomes, allocated);
            }
        }
        for container in pod.init_containers().iter().chain(pod.containers()).filter(|_| !is_whole) {
            let (outcome, allocated) = self.allocate_on(policies, pod, container, hint);
            outcomes.push(outcome);
            if allocated.is_err() {
                return (outcomes, allocated);
            }
        }
        self.affinities.insert(pod.uid().clone(), hint);
        (outcomes, Ok(()))
    }

    /// Allocates CPUs and memory to a container, in scope `container` after merging its hints. A failure is that of the
    /// policy, which refuses the merged hint, or of missing CPUs or memory; what was allocated before stays until the
    /// pod is released.
    pub fn allocate(
        &mut self,
        policies: &PlacementPolicies,
        pod: &Pod,
        container: &api::Container,
        devices: ProviderHints,
    ) -> (AllocationOutcome, Result<(), AllocationFailure>) {
        if let Some(hint) = self.affinities.get(pod.uid()) {
            // Scope `pod`: allocated at the beginning.
            return (AllocationOutcome { affinity: hint.mask, ..AllocationOutcome::default() }, Ok(()));
        }
        match self.affinity(policies, pod, container, devices) {
            Ok(hint) => self.allocate_on(policies, pod, container, hint),
            Err(failure) => (AllocationOutcome::default(), Err(failure)),
        }
    }

    fn allocate_on(
        &mut self,
        policies: &PlacementPolicies,
        pod: &Pod,
        container: &api::Container,
        hint: TopologyHint,
    ) -> (AllocationOutcome, Result<(), AllocationFailure>) {
        let mut outcome = AllocationOutcome { affinity: hint.mask, ..AllocationOutcome::default() };
        if let Some(policy) = &policies.cpu {
            outcome.requests_cpus = policy.container_cpus(pod, container) > 0;
            let policy = self.usable(policy);
            match policy.allocate(&mut self.cpu, &mut self.reusable, pod, container, hint.mask) {
                Ok(CpuAllocation::Exclusive { alignment, .. }) => outcome.new_cpus = Some(alignment),
                Ok(CpuAllocation::SharedPool | CpuAllocation::Unchanged(_)) => {}
                Err(error) => return (outcome, Err(AllocationFailure::Cpu(error))),
            }
        }
        if let Some(memory) = &mut self.memory {
            outcome.requests_memory = memory.pins(pod);
            match memory.allocate(pod, container, hint) {
                Ok(allocated) => outcome.has_new_memory = allocated == MemoryAllocation::New,
                Err(error) => return (outcome, Err(AllocationFailure::Memory(error))),
            }
            if outcome.has_new_memory {
                outcome.new_blocks = memory.blocks_of(pod.uid(), &container.name).len();
            }
        }
        (outcome, Ok(()))
    }

    /// Allocates CPUs and memory to a pod as a whole, with the parts of its containers.
    fn allocate_whole(
        &mut self,
        policies: &PlacementPolicies,
        pod: &Pod,
        hint: TopologyHint,
    ) -> (AllocationOutcome, Result<(), AllocationFailure>) {
        let mut outcome = AllocationOutcome { affinity: hint.mask, ..AllocationOutcome::default() };
        if let Some(policy) = &policies.cpu {
            let policy = self.usable(policy);
            match policy.allocate_pod(&mut self.cpu, pod, hint.mask) {
                Ok(parts) => (outcome.cpu_parts, outcome.new_cpus) = (parts, parts.alignment),
                Err(error) => return (outcome, Err(AllocationFailure::Cpu(error))),
            }
        }
        if let Some(memory) = &mut self.memory {
            match memory.allocate_pod(pod, hint) {
                Ok(parts) => (outcome.memory_parts, outcome.has_new_memory) = (parts, parts.is_new),
                Err(error) => {
                    outcome.requests_memory = true;
                    return (outcome, Err(AllocationFailure::Memory(error)));
                }
            }
        }
        (outcome, Ok(()))
    }

    /// Whether all containers of a pod have the CPUs and memory that they request.
    pub fn is_allocated(&self, policies: &PlacementPolicies, pod: &Pod) -> bool {
        if policies.serves_as_whole(pod) {
            let needs_cpus = policies.cpu.as_ref().is_some_and(|policy| policy.pod_cpus(pod) > 0);
            let needs_memory = self.memory.as_ref().is_some_and(|memory| memory.needs_pod_memory(pod));
            return (self.cpu.has_pod(pod.uid()) || !needs_cpus) && !needs_memory;
        }
        pod.init_containers().iter().chain(pod.containers()).all(|container| {
            let has_cpus = self.cpu.container(pod.uid(), &container.name).is_some();
            let needs_cpus = policies.cpu.as_ref().is_some_and(|policy| policy.container_cpus(pod, container) > 0);
            let needs_memory = self.memory.as_ref().is_some_and(|memory| memory.needs_memory(pod, container));
            (has_cpus || !needs_cpus) && !needs_memory
        })
    }

    /// Records a refusal; the oldest one is dropped.
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
        self.reusable.retain(|other| other != pod);
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
        self.reusable.retain(|pod| active.contains(pod));
        let has_cpus = self.cpu.retain(active);
        (has_cpus, self.memory.as_mut().is_some_and(|memory| memory.retain(active)))
    }

    /// Pods that have CPUs or memory.
    pub fn pods(&self) -> HashSet<PodUid> {
        let memory = self.memory.iter().flat_map(|memory| memory.checkpoint().assignments.keys());
        self.cpu.assignments.keys().chain(memory).cloned().collect()
    }

    /// CPUs of containers without exclusive ones.
    pub fn shared(&self) -> CpuSet {
        self.cpu.default.difference(&self.offline)
    }

    /// CPUs that the next container can get exclusively.
    pub fn available(&self, policy: &StaticPolicy) -> CpuSet {
        self.usable(policy).available(&self.cpu)
    }

    /// Why the resources of a pod could not be aligned or allocated.
    pub fn refusal(&self, pod: &PodUid) -> Option<String> {
        let mut refusals = self.refusals.iter();
        refusals.find(|refusal| refusal.pod.uid == *pod).map(|refusal| refusal.detail.clone())
    }

    /// Assignments and last refusals.
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
            (TopologyPolicy::None, _) | (_, TopologyScope::Pod) => Ok(none),
            (_, TopologyScope::Container) => {
                let cpu = policies.cpu.as_ref().map(|policy| {
                    hints_of_cpu(self.usable(policy).container_hints(&self.cpu, &self.reusable, pod, container))
                });
                let memory = self.memory.as_ref().map(|memory| memory.container_hints(pod, container));
                merge(policies, pod, [Some(devices), cpu, memory])
            }
        }
    }

    /// The policy without CPUs that are offline: they count as reserved.
    fn usable<'a>(&self, policy: &'a StaticPolicy) -> Cow<'a, StaticPolicy> {
        if self.offline.is_empty() {
            return Cow::Borrowed(policy);
        }
        let mut policy = policy.clone();
        policy.reserved.cpus = policy.reserved.cpus.union(&self.offline);
        let cpus = &policy.topology.cpus;
        let cores: BTreeSet<u32> = self.offline.iter().filter_map(|cpu| cpus.get(&cpu)).map(|info| info.core).collect();
        let incomplete = policy.topology.select(|info| cores.contains(&info.core));
        policy.reserved.whole_cores = policy.reserved.whole_cores.union(&incomplete);
        Cow::Owned(policy)
    }
}

/// Merges the hints of devices, CPUs, and memory; a manager with the policy `none` is no provider.
fn merge(
    policies: &PlacementPolicies,
    pod: &Pod,
    providers: [Option<ProviderHints>; 3],
) -> Result<TopologyHint, AllocationFailure> {
    let providers: Vec<ProviderHints> = providers.into_iter().flatten().collect();
    let lists = hint_lists(&providers);
    let topology = &policies.topology;
    let decision = topology.policy.merge(&lists, &topology.topology);
    if decision.is_admitted {
        return Ok(decision.hint);
    }
    let detail = explain(&lists, topology.policy, &topology.topology);
    let text = match policies.pod_level.manages(pod) {
        true => TopologyAffinityError::pod_level_text(topology.scope).to_owned(),
        false => TopologyAffinityError { detail: detail.clone() }.to_string(),
    };
    Err(AllocationFailure::Topology { text, detail })
}

fn hints_of_cpu(hints: Option<Vec<TopologyHint>>) -> ProviderHints {
    hints.map(|hints| ProviderHints::from([("cpu".to_owned(), Some(hints))])).unwrap_or_default()
}
