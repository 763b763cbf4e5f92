//! State owner of the CPU, memory, and topology managers: start, admission, checkpoints, metrics.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::info;

use super::{
    placement_state::{AllocationFailure, AllocationOutcome, PlacementSnapshot, PlacementState},
    settings::PlacementPolicies,
};
use crate::{
    checkpoint_writer::CheckpointWriter,
    cpu::{self, CpuState, InitialContainers},
    devices::alignment::ResourceAlignment,
    drain_advice::drain_advice,
    memory::{MemoryCheckpoint, MemoryPolicy, StaticMemoryPolicy},
    numa::{NumaMask, ProviderHints, TopologyPolicy, TopologyScope},
    pod_level::PodLevelManagement,
};
use berth_metrics::{
    AlignmentBoundary, AlignmentScope, AllocationSource, AssignmentKind, CpuManagerMetrics, ManagedResource,
    MemoryManagerMetrics, Registry, ResourceManagerMetrics, TopologyManagerMetrics,
};
use berth_ports::{AllocationRefusal, StateFile};
use berth_types::{ContainerId, CpuSet, Pod, PodUid, api};

/// Dependencies of the manager.
pub struct PlacementManagerDeps {
    /// The checkpoint `cpu_manager_state`.
    pub cpu_file: Arc<dyn StateFile>,
    /// The checkpoint `memory_manager_state`.
    pub memory_file: Arc<dyn StateFile>,
    /// Containers that the runtime reports, for checkpoints of the oldest format.
    pub containers: InitialContainers,
    /// Receives the families of all three managers.
    pub registry: Registry,
    /// Tracks the writer tasks.
    pub tasks: TaskTracker,
    /// Ends the writer tasks.
    pub shutdown: CancellationToken,
}

/// Metric handles of the three managers.
struct PlacementMetrics {
    cpu: CpuManagerMetrics,
    memory: MemoryManagerMetrics,
    topology: TopologyManagerMetrics,
    /// Families of the gate `PodLevelResourceManagers`; `None` without it.
    pod_level: Option<ResourceManagerMetrics>,
}

/// A container with the CPUs that it was last given in the runtime.
#[derive(Debug)]
pub(super) struct AppliedContainer {
    pub pod: PodUid,
    pub name: String,
    pub cpus: CpuSet,
    /// Whether it was observed running. Before, it may just have been created.
    pub is_observed: bool,
}

/// CPUs that containers were last given in the runtime.
#[derive(Debug, Default)]
pub(super) struct AppliedCpus {
    pub containers: BTreeMap<ContainerId, AppliedContainer>,
    /// Of containers that are being created, by pod and name.
    pub prepared: BTreeMap<(PodUid, String), CpuSet>,
}

/// Numbers of the requests to write the checkpoints; 0 is on disk since the start.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct WriteRequests {
    pub cpu: u64,
    pub memory: u64,
}

/// See the module documentation.
pub struct PlacementManager {
    pub(super) policies: PlacementPolicies,
    state: Arc<Mutex<PlacementState>>,
    applied: Mutex<AppliedCpus>,
    /// Requests to write the checkpoints, of pods that have CPUs or memory since the start.
    unsaved: Mutex<BTreeMap<PodUid, WriteRequests>>,
    /// Containers that had exclusive CPUs in the checkpoint at the start, and that the runtime has created with these.
    pub(super) restored: BTreeMap<PodUid, BTreeMap<String, CpuSet>>,
    /// Number of the last change of the shared pool.
    pub(super) changes: watch::Sender<u64>,
    /// Number of the last change that all running containers have.
    pub(super) reconciled: watch::Sender<u64>,
    pub(super) cpu_checkpoint: CheckpointWriter,
    pub(super) memory_checkpoint: CheckpointWriter,
    metrics: PlacementMetrics,
}

impl PlacementManager {
    /// Restores the state from the checkpoints and validates it against the machine; writes missing checkpoints.
    ///
    /// # Errors
    /// The reference's text, if a checkpoint cannot be read, or does not fit policy, machine, or reservations.
    pub async fn open(policies: PlacementPolicies, deps: PlacementManagerDeps) -> Result<Arc<Self>, String> {
        let of_cpu = |error: String| format!("start cpu manager error: {error}");
        let of_memory = |error: String| format!("start memory manager error: {error}");
        let (cpu, cpu_content) = restore_cpu(&policies, &deps).await.map_err(of_cpu)?;
        let (memory, memory_content) = restore_memory(&policies, &deps).await.map_err(of_memory)?;
        // A resize assigns CPUs to a container that has others, and the agent may have ended before it changed them.
        let restored = if policies.resizes_exclusive_cpus { BTreeMap::new() } else { cpu.assignments.clone() };
        let state = Arc::new(Mutex::new(PlacementState::restored(cpu, memory)));
        let cpu_policy = if policies.cpu.is_some() { "static" } else { "none" };
        let (cpu_encoded, memory_encoded) = (state.clone(), state.clone());
        let encode_cpu = move || {
            let cpu = lock(&cpu_encoded).cpu.clone();
            cpu::checkpoint::encode(cpu_policy, &cpu)
        };
        let encode_memory = move || {
            let memory = lock(&memory_encoded).memory.as_ref().map(|memory| memory.checkpoint().clone());
            memory.unwrap_or_else(|| MemoryCheckpoint::new(MemoryPolicy::None)).encode()
        };
        // An unchanged file is not written: the agent starts on a full disk.
        let is_cpu_saved = cpu_content == Some(encode_cpu());
        let is_memory_saved = memory_content == Some(encode_memory());
        let cpu_checkpoint = CheckpointWriter::spawn(&deps.tasks, &deps.shutdown, deps.cpu_file, encode_cpu);
        let memory_checkpoint = CheckpointWriter::spawn(&deps.tasks, &deps.shutdown, deps.memory_file, encode_memory);
        if !is_cpu_saved {
            cpu_checkpoint.write().await.map_err(of_cpu)?;
        }
        if !is_memory_saved {
            memory_checkpoint.write().await.map_err(of_memory)?;
        }
        let metrics = PlacementMetrics {
            cpu: CpuManagerMetrics::new(&deps.registry),
            memory: MemoryManagerMetrics::new(&deps.registry),
            topology: TopologyManagerMetrics::new(&deps.registry, &aligned_boundaries(&policies)),
            pod_level: (policies.pod_level == PodLevelManagement::On)
                .then(|| ResourceManagerMetrics::new(&deps.registry)),
        };
        let manager = Self {
            policies,
            state,
            applied: Mutex::default(),
            unsaved: Mutex::default(),
            restored,
            // The first pass after the start counts as a change: a container is not created before it.
            changes: watch::Sender::new(1),
            reconciled: watch::Sender::new(0),
            cpu_checkpoint,
            memory_checkpoint,
            metrics,
        };
        manager.update_gauges(&manager.state());
        Ok(Arc::new(manager))
    }

    /// Policies and topology of the machine.
    pub fn policies(&self) -> &PlacementPolicies {
        &self.policies
    }

    /// Assignments and last refusals; with the CPU policy `none` all CPUs are shared.
    pub fn snapshot(&self) -> PlacementSnapshot {
        let mut snapshot = self.state().snapshot();
        if self.policies.cpu.is_none() {
            snapshot.shared = self.policies.machine.cpus.all();
        }
        snapshot
    }

    /// Why the resources of a pod could not be aligned or allocated; `None` if it was not refused lately.
    pub fn refusal(&self, pod: &PodUid) -> Option<String> {
        self.state().refusal(pod)
    }

    /// Releases the resources of all pods that are not in a published set of active pods. A pod whose admission has
    /// begun keeps its resources until it was published once: the set is older than its admission.
    pub fn retain_published(&self, active: &HashSet<PodUid>) {
        let released = self.state().retain_published(active);
        self.released(released);
        let mut applied = self.applied();
        applied.containers.retain(|_, container| container.is_observed || active.contains(&container.pod));
        applied.prepared.retain(|(pod, _), _| active.contains(pod));
    }

    /// Excludes CPUs that went offline, until they are online again; with `keeps_offline` until the agent starts again.
    pub fn set_online(&self, online: &CpuSet, keeps_offline: bool) {
        let Some(policy) = &self.policies.cpu else { return };
        let mut offline = policy.topology.all().difference(online);
        let mut state = self.state();
        if keeps_offline {
            offline = offline.union(&state.offline);
        }
        if state.offline != offline {
            info!(%offline, "CPUs went offline or online: offline CPUs are excluded from the shared pool");
            state.offline = offline;
            self.update_gauges(&state);
            drop(state);
            self.pool_changed();
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, PlacementState> {
        lock(&self.state)
    }

    pub(super) fn applied(&self) -> MutexGuard<'_, AppliedCpus> {
        self.applied.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn pool_changed(&self) {
        self.changes.send_modify(|number| *number = number.saturating_add(1));
    }

    fn released(&self, (cpus, memory): (bool, bool)) {
        if cpus {
            self.update_gauges(&self.state());
            self.cpu_checkpoint.request();
            self.pool_changed();
        }
        if memory {
            self.memory_checkpoint.request();
        }
        if cpus || memory {
            let pods = self.state().pods();
            self.unsaved().retain(|pod, _| pods.contains(pod));
        }
    }

    fn update_gauges(&self, state: &PlacementState) {
        let Some(policy) = &self.policies.cpu else { return };
        self.metrics.cpu.set_shared_pool(state.available(policy).len());
        let exclusive = state.cpu.exclusive();
        let mut per_node = BTreeMap::new();
        for info in exclusive.iter().filter_map(|cpu| policy.topology.cpus.get(&cpu)) {
            *per_node.entry(info.node).or_insert(0_usize) += 1;
        }
        self.metrics.cpu.set_exclusive(exclusive.len(), &per_node);
    }

    /// Counts an outcome and schedules the writes of the checkpoints.
    fn record_outcome(&self, pod: &Pod, outcome: &AllocationOutcome, is_allocated: bool) {
        self.count_requests(outcome);
        self.count_assignments(outcome);
        if is_allocated {
            self.count_alignment(outcome);
        }
        let has_new_cpus = outcome.new_cpus.is_some();
        if has_new_cpus || outcome.has_new_memory {
            let mut unsaved = self.unsaved();
            let requests = unsaved.entry(pod.uid().clone()).or_default();
            if has_new_cpus {
                requests.cpu = self.cpu_checkpoint.request();
            }
            if outcome.has_new_memory {
                requests.memory = self.memory_checkpoint.request();
            }
        }
        if has_new_cpus {
            self.update_gauges(&self.state());
            self.pool_changed();
        }
    }

    pub(super) fn unsaved(&self) -> MutexGuard<'_, BTreeMap<PodUid, WriteRequests>> {
        self.unsaved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count_requests(&self, outcome: &AllocationOutcome) {
        if outcome.requests_cpus {
            self.metrics.cpu.pinning_requested();
        }
        if outcome.requests_memory {
            self.metrics.memory.pinning_requested();
        }
        (0..outcome.cpu_parts.exclusive).for_each(|_| self.metrics.cpu.pinning_requested());
        (0..outcome.memory_parts.requests).for_each(|_| self.metrics.memory.pinning_requested());
    }

    /// Counts what containers got from the node, and what they got as parts of what their pod has.
    fn count_assignments(&self, outcome: &AllocationOutcome) {
        let Some(metrics) = &self.metrics.pod_level else { return };
        let AllocationOutcome { cpu_parts, memory_parts, new_blocks, .. } = outcome;
        let of_pod = [
            (ManagedResource::Cpu, cpu_parts.exclusive, cpu_parts.shared, cpu_parts.alignment.is_some()),
            (ManagedResource::Memory, memory_parts.exclusive, memory_parts.shared, memory_parts.is_new),
        ];
        for (resource, exclusive, shared, _) in of_pod.into_iter().filter(|(.., is_new)| *is_new) {
            metrics.allocated(resource, AllocationSource::Pod, exclusive.saturating_add(shared));
            metrics.assigned(resource, AssignmentKind::PodExclusive, exclusive);
            metrics.assigned(resource, AssignmentKind::PodShared, shared);
        }
        if outcome.requests_cpus && outcome.new_cpus.is_some() {
            metrics.allocated(ManagedResource::Cpu, AllocationSource::Node, 1);
            metrics.assigned(ManagedResource::Cpu, AssignmentKind::NodeExclusive, 1);
        }
        if *new_blocks > 0 {
            metrics.allocated(ManagedResource::Memory, AllocationSource::Node, *new_blocks);
            metrics.assigned(ManagedResource::Memory, AssignmentKind::NodeExclusive, 1);
        }
    }

    fn count_alignment(&self, outcome: &AllocationOutcome) {
        let container = AlignmentScope::Container;
        // The reference counts whole cores only where they are required, but a common cache always.
        let needs_cores = self.policies.cpu.as_ref().is_some_and(|policy| policy.options.full_cores_only);
        if outcome.requests_cpus && needs_cores {
            self.metrics.topology.aligned(container, AlignmentBoundary::PhysicalCpu);
        }
        if outcome.new_cpus.is_some_and(|alignment| alignment.has_one_uncore_cache) {
            self.metrics.topology.aligned(container, AlignmentBoundary::UncoreCache);
        }
        if single_node_scope(&self.policies) == Some(container) {
            self.metrics.topology.aligned(container, AlignmentBoundary::NumaNode);
        }
    }

    fn count_failure(&self, failure: &AllocationFailure, source: AllocationSource) {
        let container = AlignmentScope::Container;
        let count_error = |resource| {
            if let Some(metrics) = &self.metrics.pod_level {
                metrics.failed(resource, source);
            }
        };
        match failure {
            AllocationFailure::Topology { .. } => {
                if let Some(scope) = single_node_scope(&self.policies) {
                    self.metrics.topology.not_aligned(scope, AlignmentBoundary::NumaNode);
                }
            }
            AllocationFailure::Cpu(_) => {
                self.metrics.cpu.pinning_failed();
                count_error(ManagedResource::Cpu);
                let needs_cores = self.policies.cpu.as_ref().is_some_and(|policy| policy.options.full_cores_only);
                if needs_cores && source == AllocationSource::Node {
                    self.metrics.topology.not_aligned(container, AlignmentBoundary::PhysicalCpu);
                }
            }
            AllocationFailure::Memory(_) => {
                self.metrics.memory.pinning_failed();
                count_error(ManagedResource::Memory);
            }
        }
    }

    fn refused(&self, pod: &Pod, failure: &AllocationFailure) -> AllocationRefusal {
        let is_whole = self.policies.serves_as_whole(pod);
        self.count_failure(failure, if is_whole { AllocationSource::Pod } else { AllocationSource::Node });
        let refusal = failure.refusal();
        self.state().record_refusal(pod, &refusal);
        refusal
    }
}

impl ResourceAlignment for PlacementManager {
    fn merges_hints(&self) -> bool {
        self.policies.topology.policy != TopologyPolicy::None
    }

    fn retain(&self, mut active: HashSet<PodUid>, candidate: &PodUid) {
        active.insert(candidate.clone());
        let released = self.state().retain(&active);
        self.released(released);
    }

    fn is_allocated(&self, pod: &Pod) -> bool {
        self.state().is_allocated(&self.policies, pod)
    }

    fn begin(&self, pod: &Pod, hints: &dyn Fn() -> ProviderHints) -> Result<(), AllocationRefusal> {
        self.metrics.topology.admission_requested();
        // Before the lock: the devices have one of their own.
        let devices = if self.merges_hints() { hints() } else { ProviderHints::new() };
        let (outcomes, begun) = self.state().begin(&self.policies, pod, devices);
        for (number, outcome) in outcomes.iter().enumerate() {
            // The last one is that of a failure.
            let is_allocated = begun.is_ok() || number + 1 < outcomes.len();
            self.record_outcome(pod, outcome, is_allocated);
        }
        begun.map_err(|failure| self.refused(pod, &failure))
    }

    fn allocate(
        &self,
        pod: &Pod,
        container: &api::Container,
        hints: &dyn Fn() -> ProviderHints,
    ) -> Result<Option<NumaMask>, AllocationRefusal> {
        let devices = if self.merges_hints() { hints() } else { ProviderHints::new() };
        let (outcome, allocated) = self.state().allocate(&self.policies, pod, container, devices);
        self.record_outcome(pod, &outcome, allocated.is_ok());
        allocated.map_err(|failure| self.refused(pod, &failure))?;
        Ok(outcome.affinity)
    }

    fn admission_ended(&self, took: Duration, is_refused: bool) {
        self.metrics.topology.admission_took(took);
        if is_refused {
            self.metrics.topology.admission_refused();
        } else if single_node_scope(&self.policies) == Some(AlignmentScope::Pod) {
            self.metrics.topology.aligned(AlignmentScope::Pod, AlignmentBoundary::NumaNode);
        }
    }

    fn release(&self, pod: &PodUid) {
        let released = self.state().release(pod);
        self.released(released);
    }
}

fn lock(state: &Mutex<PlacementState>) -> MutexGuard<'_, PlacementState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Pairs of scope and boundary that these policies can count.
fn aligned_boundaries(policies: &PlacementPolicies) -> Vec<(AlignmentScope, AlignmentBoundary)> {
    let of_cpus = [AlignmentBoundary::PhysicalCpu, AlignmentBoundary::UncoreCache];
    let of_cpus = of_cpus.into_iter().filter(|_| policies.cpu.is_some());
    let mut pairs: Vec<_> = of_cpus.map(|boundary| (AlignmentScope::Container, boundary)).collect();
    pairs.extend(single_node_scope(policies).map(|scope| (scope, AlignmentBoundary::NumaNode)));
    pairs
}

/// What is aligned to one NUMA node; `None` unless the topology policy guarantees it.
fn single_node_scope(policies: &PlacementPolicies) -> Option<AlignmentScope> {
    match (policies.topology.policy, policies.topology.scope) {
        (TopologyPolicy::SingleNumaNode, TopologyScope::Container) => Some(AlignmentScope::Container),
        (TopologyPolicy::SingleNumaNode, TopologyScope::Pod) => Some(AlignmentScope::Pod),
        _ => None,
    }
}

/// Restores the CPU manager's state; returns it with the content of its file.
pub(super) async fn restore_cpu(
    policies: &PlacementPolicies,
    deps: &PlacementManagerDeps,
) -> Result<(CpuState, Option<Vec<u8>>), String> {
    let file = &*deps.cpu_file;
    let path = file.path();
    let content = file.read().await.map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let name = if policies.cpu.is_some() { "static" } else { "none" };
    let decode = |content: &Vec<u8>| cpu::checkpoint::decode(content, name, &deps.containers);
    let restored = content.as_ref().map(decode).transpose();
    let mut state = restored.map_err(|error| drain_advice(&error, "CPU manager", path))?.unwrap_or_default();
    if let Some(policy) = &policies.cpu {
        // The reference gives the same advice here: only an operator can decide that no pod uses the CPUs.
        policy.initialize(&mut state).map_err(|error| {
            format!("static policy invalid state, please drain node and remove policy state file: {error}")
        })?;
    }
    Ok((state, content))
}

pub(super) async fn restore_memory(
    policies: &PlacementPolicies,
    deps: &PlacementManagerDeps,
) -> Result<(Option<StaticMemoryPolicy>, Option<Vec<u8>>), String> {
    let file = &*deps.memory_file;
    let path = file.path();
    let content = file.read().await.map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let policy = if policies.memory.is_some() { MemoryPolicy::Static } else { MemoryPolicy::None };
    let restored = content.as_ref().map(|content| MemoryCheckpoint::restore(content, policy)).transpose();
    let restored = restored.map_err(|error| drain_advice(&error, "memory manager", path))?;
    let Some(reserved) = &policies.memory else { return Ok((None, content)) };
    let memory = match restored {
        None => StaticMemoryPolicy::new(&policies.machine, reserved),
        Some(checkpoint) => {
            StaticMemoryPolicy::restore(&policies.machine, reserved, checkpoint).map_err(|error| error.to_string())?
        }
    };
    Ok((Some(memory.with_pod_level(policies.pod_level)), content))
}
