//! Owner of the state of the CPU, memory, and topology managers: start, admission, checkpoints, metrics.

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
    memory::{MemoryCheckpoint, MemoryPolicy, StaticMemoryPolicy},
    numa::{NumaMask, ProviderHints, TopologyPolicy},
};
use berth_metrics::{
    AlignmentBoundary, AlignmentScope, CpuManagerMetrics, MemoryManagerMetrics, Registry, TopologyManagerMetrics,
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
}

/// CPUs that containers were last given in the runtime.
#[derive(Debug, Default)]
pub(super) struct AppliedCpus {
    /// By container ID.
    pub containers: BTreeMap<ContainerId, CpuSet>,
    /// Of containers that are being created, by pod and name.
    pub prepared: BTreeMap<(PodUid, String), CpuSet>,
}

/// See the module documentation.
pub struct PlacementManager {
    pub(super) policies: PlacementPolicies,
    state: Arc<Mutex<PlacementState>>,
    applied: Mutex<AppliedCpus>,
    /// Containers that had exclusive CPUs in the checkpoint at the start: the runtime has created them with these.
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
        let cpu = restore_cpu(&policies, &deps).await.map_err(|error| format!("start cpu manager error: {error}"))?;
        let memory =
            restore_memory(&policies, &deps).await.map_err(|error| format!("start memory manager error: {error}"))?;
        let restored = cpu.assignments.clone();
        let state = Arc::new(Mutex::new(PlacementState::restored(cpu, memory)));
        let cpu_policy = if policies.cpu.is_some() { "static" } else { "none" };
        let (cpu_encoded, memory_encoded) = (state.clone(), state.clone());
        let cpu_checkpoint = CheckpointWriter::spawn(&deps.tasks, &deps.shutdown, deps.cpu_file, move || {
            let cpu = lock(&cpu_encoded).cpu.clone();
            cpu::checkpoint::encode(cpu_policy, &cpu)
        });
        let memory_checkpoint = CheckpointWriter::spawn(&deps.tasks, &deps.shutdown, deps.memory_file, move || {
            let memory = lock(&memory_encoded).memory.as_ref().map(|memory| memory.checkpoint().clone());
            memory.unwrap_or_else(|| MemoryCheckpoint::new(MemoryPolicy::None)).encode()
        });
        cpu_checkpoint.write().await.map_err(|error| format!("start cpu manager error: {error}"))?;
        memory_checkpoint.write().await.map_err(|error| format!("start memory manager error: {error}"))?;
        let metrics = PlacementMetrics {
            cpu: CpuManagerMetrics::new(&deps.registry),
            memory: MemoryManagerMetrics::new(&deps.registry),
            topology: TopologyManagerMetrics::new(&deps.registry, &aligned_boundaries(&policies)),
        };
        let manager = Self {
            policies,
            state,
            applied: Mutex::default(),
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

    /// What the managers know, for people.
    pub fn snapshot(&self) -> PlacementSnapshot {
        let mut snapshot = self.state().snapshot();
        if self.policies.cpu.is_none() {
            snapshot.shared = self.policies.machine.cpus.all();
        }
        snapshot
    }

    /// Why the resources of a pod could not be aligned or allocated; `None` if it was not refused lately.
    pub fn refusal(&self, pod: &PodUid) -> Option<String> {
        let refusals = self.state().snapshot().refusals;
        refusals.into_iter().find(|refusal| refusal.pod.uid == *pod).map(|refusal| refusal.detail)
    }

    /// Releases the resources of all pods that are not in a published set of active pods. A pod whose admission has begun
    /// keeps its resources until it was published once: the set is older than its admission.
    pub fn retain_published(&self, active: &HashSet<PodUid>) {
        let released = self.state().retain_published(active);
        self.released(released);
    }

    /// Excludes CPUs that went offline, until they are online again.
    pub fn set_online(&self, online: &CpuSet) {
        let Some(policy) = &self.policies.cpu else { return };
        let offline = policy.topology.all().difference(online);
        let mut state = self.state();
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

    fn pool_changed(&self) {
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

    fn count_outcome(&self, outcome: &AllocationOutcome) {
        let container = AlignmentScope::Container;
        if outcome.requests_cpus {
            self.metrics.cpu.pinning_requested();
            if self.policies.cpu.as_ref().is_some_and(|policy| policy.options.full_cores_only) {
                self.metrics.topology.aligned(container, AlignmentBoundary::PhysicalCpu);
            }
        }
        let prefers_cache = self.policies.cpu.as_ref().is_some_and(|policy| policy.options.prefers_uncore_cache);
        if prefers_cache && outcome.new_cpus.is_some_and(|alignment| alignment.has_one_uncore_cache) {
            self.metrics.topology.aligned(container, AlignmentBoundary::UncoreCache);
        }
        if self.policies.topology.policy == TopologyPolicy::SingleNumaNode {
            self.metrics.topology.aligned(container, AlignmentBoundary::NumaNode);
        }
        if outcome.requests_memory {
            self.metrics.memory.pinning_requested();
        }
    }

    fn count_failure(&self, failure: &AllocationFailure) {
        let container = AlignmentScope::Container;
        match failure {
            AllocationFailure::Topology(_) => {
                if self.policies.topology.policy == TopologyPolicy::SingleNumaNode {
                    self.metrics.topology.not_aligned(container, AlignmentBoundary::NumaNode);
                }
            }
            AllocationFailure::Cpu(_) => {
                self.metrics.cpu.pinning_requested();
                self.metrics.cpu.pinning_failed();
                if self.policies.cpu.as_ref().is_some_and(|policy| policy.options.full_cores_only) {
                    self.metrics.topology.not_aligned(container, AlignmentBoundary::PhysicalCpu);
                }
            }
            AllocationFailure::Memory(_) => {
                self.metrics.memory.pinning_requested();
                self.metrics.memory.pinning_failed();
            }
        }
    }

    fn refused(&self, pod: &Pod, failure: &AllocationFailure) -> AllocationRefusal {
        self.count_failure(failure);
        let refusal = failure.refusal();
        self.state().record_refusal(pod, &refusal);
        refusal
    }
}

impl ResourceAlignment for PlacementManager {
    fn merges_hints(&self) -> bool {
        self.policies.topology.policy != TopologyPolicy::None
    }

    fn begin(
        &self,
        pod: &Pod,
        active: Option<&HashSet<PodUid>>,
        hints: &dyn Fn() -> ProviderHints,
    ) -> Result<(), AllocationRefusal> {
        self.metrics.topology.admission_requested();
        if let Some(active) = active {
            let mut active = active.clone();
            active.insert(pod.uid().clone());
            let released = self.state().retain(&active);
            self.released(released);
        }
        let devices = if self.merges_hints() { hints() } else { ProviderHints::new() };
        let begun = self.state().begin(&self.policies, pod, devices);
        begun.map_err(|failure| self.refused(pod, &failure))
    }

    fn allocate(
        &self,
        pod: &Pod,
        container: &api::Container,
        hints: &dyn Fn() -> ProviderHints,
    ) -> Result<Option<NumaMask>, AllocationRefusal> {
        // Before the lock: the devices have one of their own.
        let devices = if self.merges_hints() { hints() } else { ProviderHints::new() };
        let allocated = self.state().allocate(&self.policies, pod, container, devices);
        let outcome = allocated.map_err(|failure| self.refused(pod, &failure))?;
        self.count_outcome(&outcome);
        if outcome.new_cpus.is_some() {
            self.update_gauges(&self.state());
            self.cpu_checkpoint.request();
            self.pool_changed();
        }
        if outcome.has_new_memory {
            self.memory_checkpoint.request();
        }
        Ok(outcome.affinity)
    }

    fn admission_ended(&self, took: Duration, is_refused: bool) {
        self.metrics.topology.admission_took(took);
        if is_refused {
            self.metrics.topology.admission_refused();
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
    let options = policies.cpu.as_ref().map(|policy| policy.options).unwrap_or_default();
    let is_single_node = policies.topology.policy == TopologyPolicy::SingleNumaNode;
    let boundaries = [
        (options.full_cores_only, AlignmentBoundary::PhysicalCpu),
        (options.prefers_uncore_cache, AlignmentBoundary::UncoreCache),
        (is_single_node, AlignmentBoundary::NumaNode),
    ];
    let active = boundaries.into_iter().filter(|(is_active, _)| *is_active);
    active.map(|(_, boundary)| (AlignmentScope::Container, boundary)).collect()
}

async fn restore_cpu(policies: &PlacementPolicies, deps: &PlacementManagerDeps) -> Result<CpuState, String> {
    let file = &*deps.cpu_file;
    let path = file.path().display().to_string();
    let content = file.read().await.map_err(|error| format!("cannot read {path}: {error}"))?;
    let name = if policies.cpu.is_some() { "static" } else { "none" };
    let restored = content.map(|content| cpu::checkpoint::decode(&content, name, &deps.containers)).transpose();
    let mut state = restored.map_err(|error| error.with_advice(&path))?.unwrap_or_default();
    if let Some(policy) = &policies.cpu {
        // The reference gives the same advice here: only an operator can decide that no pod uses the CPUs.
        policy.initialize(&mut state).map_err(|error| {
            format!("static policy invalid state, please drain node and remove policy state file: {error}")
        })?;
    }
    Ok(state)
}

async fn restore_memory(
    policies: &PlacementPolicies,
    deps: &PlacementManagerDeps,
) -> Result<Option<StaticMemoryPolicy>, String> {
    let file = &*deps.memory_file;
    let path = file.path();
    let content = file.read().await.map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let policy = if policies.memory.is_some() { MemoryPolicy::Static } else { MemoryPolicy::None };
    let restored = content.map(|content| MemoryCheckpoint::restore(&content, policy)).transpose();
    let restored = restored.map_err(|error| error.drain_text(path))?;
    let Some(reserved) = &policies.memory else { return Ok(None) };
    match restored {
        None => Ok(Some(StaticMemoryPolicy::new(&policies.machine, reserved))),
        Some(checkpoint) => {
            let restored = StaticMemoryPolicy::restore(&policies.machine, reserved, checkpoint);
            restored.map(Some).map_err(|error| error.to_string())
        }
    }
}
