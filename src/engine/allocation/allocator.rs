//! Allocation manager: admits pods, stores their allocated resources, and retries pending resizes.
//!
//! Implements spec 02a §8.2-8.3.

use std::{
    collections::{HashMap, HashSet},
    io,
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use tracing::{error, info, warn};

use super::{
    Allocations, Checkpoint, PendingReason, StateError, Writer,
    resize::{PendingResize, changes_exclusive_cpus, order, requested_changes, summary},
    writer::{self, WriterHandle},
};
use crate::engine::admission::{Admission, AdmissionRejection, AdmissionRules, AdmitInput, Purpose, admit, precheck};
use berth_metrics::{AdmissionMetrics, AllocationMetrics};
use berth_ports::{Clock, EventRecord, EventSink, NodeFacts, PodDevices, StateFile};
use berth_types::{Pod, PodUid, resource_state::PodResources};

/// Delay until the next resize attempt while the sources are not ready.
const RETRY_FIRST: Duration = Duration::from_secs(30);
/// Delay until the next periodic resize attempt.
const RETRY: Duration = Duration::from_secs(180);

/// Dependencies of the allocator.
pub struct AllocatorDeps {
    /// The checkpoint `<root-dir>/allocated_pods_state`.
    pub file: Arc<dyn StateFile>,
    /// Recorder of pod events.
    pub events: Arc<dyn EventSink>,
    /// Wall clock for the times of conditions.
    pub clock: Arc<dyn Clock>,
    /// Admission settings, fixed at start.
    pub rules: AdmissionRules,
    /// Metrics of refusals and preemptions.
    pub admission: AdmissionMetrics,
    /// Metrics of resizes.
    pub allocation: AllocationMetrics,
}

/// Whether the runtime runs containers of a pod.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RuntimePresence {
    /// No container runs.
    Absent,
    /// At least one container runs.
    Running,
}

/// A pod to be admitted.
#[derive(Clone, Copy)]
pub struct Candidate<'a> {
    /// The pod as desired.
    pub pod: &'a Arc<Pod>,
    /// Whether its containers already run (after a restart of the agent).
    pub presence: RuntimePresence,
    /// The active pods, as desired.
    pub active: &'a [Arc<Pod>],
    /// Facts about the node.
    pub node: &'a NodeFacts,
}

/// Trigger of a resize retry: label `retry_trigger`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trigger {
    /// Pods were added.
    PodsAdded,
    /// A pod's definition changed.
    PodUpdated,
    /// Pods were removed.
    PodsRemoved,
    /// A pod became terminal.
    PodTerminated,
    /// A pod's effective request shrank.
    PodResized,
    /// The periodic timer fired.
    Periodic,
}

impl Trigger {
    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::PodsAdded => "pods_added",
            Self::PodUpdated => "pod_updated",
            Self::PodsRemoved => "pods_removed",
            Self::PodTerminated => "pod_terminated",
            Self::PodResized => "pod_resized",
            Self::Periodic => "periodic_retry",
        }
    }
}

/// Input of one round of resize attempts.
#[derive(Clone, Copy)]
pub struct Retry<'a> {
    /// What triggered the round.
    pub trigger: Trigger,
    /// Whether all sources are ready; no resize is attempted before.
    pub sources_ready: bool,
    /// The active pods, as desired; a pending pod that is not among them is removed from the list.
    pub active: &'a [Arc<Pod>],
    /// Facts about the node.
    pub node: &'a NodeFacts,
    /// Allocates exclusive CPUs.
    pub devices: &'a dyn PodDevices,
}

/// Victims that must be killed before a critical pod's resize fits. The resize is retried once they are
/// gone; a victim that still runs is returned again by the periodic retry.
#[derive(Clone, PartialEq, Debug)]
pub struct Preempt {
    /// UID of the critical pod.
    pub pod: PodUid,
    /// Victims, and the insufficient resource.
    pub admitted: Admission,
}

/// Result of one round of resize attempts.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct RetryResult {
    /// Delay until the next round.
    pub next: Duration,
    /// Pods whose allocation or conditions changed: sync them with a fresh observation.
    pub changed: Vec<PodUid>,
    /// Preemptions for critical pods.
    pub preempt: Vec<Preempt>,
}

/// Allocation manager: the only writer of allocations; owned by the sync loop.
pub struct Allocator {
    shared: Allocations,
    writer: WriterHandle,
    idle: Option<Writer>,
    deps: AllocatorDeps,
    /// UIDs in the checkpoint that the agent started with.
    restored: HashSet<PodUid>,
    rejected: HashSet<PodUid>,
    pending: Vec<PodUid>,
    /// Victims already returned for resizes of critical pods.
    named: HashSet<PodUid>,
}

impl Allocator {
    /// Restores the allocations from the checkpoint.
    ///
    /// # Errors
    /// The file cannot be read or is corrupt: the agent must not start (AC-02a-21).
    pub async fn load(deps: AllocatorDeps) -> Result<Self, StateError> {
        let (checkpoint, entries) = Checkpoint::load(deps.file.clone()).await?;
        let restored = entries.keys().cloned().collect();
        let shared = Allocations::new(entries, deps.events.clone(), deps.clock.clone(), deps.allocation.clone());
        let (writer, idle) = writer::pair(checkpoint, shared.clone());
        Ok(Self {
            shared,
            writer,
            idle: Some(idle),
            deps,
            restored,
            rejected: HashSet::new(),
            pending: Vec::new(),
            named: HashSet::new(),
        })
    }

    /// Returns the checkpoint writer task on the first call. No resize is granted unless it runs.
    pub fn take_writer(&mut self) -> Option<Writer> {
        self.idle.take()
    }

    /// The shared view of the allocations.
    pub fn allocations(&self) -> Allocations {
        self.shared.clone()
    }

    /// The pod with its allocated resources in place of the requested ones.
    pub fn allocated(&self, pod: &Arc<Pod>) -> Arc<Pod> {
        self.shared.allocated(pod)
    }

    /// Decides on what must be refused before devices are allocated to the pod.
    ///
    /// # Errors
    /// The first refusal.
    pub fn precheck(&self, candidate: Candidate<'_>) -> Result<(), AdmissionRejection> {
        let pod = self.shared.allocated(candidate.pod);
        let input = AdmitInput {
            pod: &pod,
            purpose: Purpose::New,
            active: &[],
            rejected: &self.rejected,
            node: candidate.node,
            rules: &self.deps.rules,
        };
        precheck(&input)
    }

    /// Admits a pod and schedules a checkpoint of its allocation. If preemption is needed
    /// ([`Admission::victims`]) nothing is stored: kill the victims, then call again.
    ///
    /// # Errors
    /// The first refusal. It is not counted: pass a final one to [`Allocator::reject`].
    pub fn admit(&mut self, candidate: Candidate<'_>) -> Result<Admission, AdmissionRejection> {
        let pod = self.shared.allocated(candidate.pod);
        let is_restored = candidate.presence == RuntimePresence::Running && self.restored.contains(pod.uid());
        let purpose = if is_restored { Purpose::Restored } else { Purpose::New };
        let admitted = self.ask(&pod, purpose, candidate.active, candidate.node)?;
        if admitted.victims.is_empty() {
            self.store(&pod);
        }
        Ok(admitted)
    }

    /// Stores the allocation of an admitted pod and schedules a checkpoint. The pod runs even if the
    /// write fails.
    pub fn store(&mut self, pod: &Arc<Pod>) {
        self.rejected.remove(pod.uid());
        self.shared.change(|state| state.entries.insert(pod.uid().clone(), PodResources::of(pod)));
        self.writer.schedule_write();
    }

    /// Marks a pod as rejected and removes its allocation. Updates the metric and records the event.
    pub fn reject(&mut self, pod: &Pod, refusal: &AdmissionRejection) {
        self.deps.admission.rejections.with_label_values(&[refusal.metric_reason()]).inc();
        self.deps.events.record(EventRecord::warning(pod.id(), refusal.reason.clone(), refusal.event_message()));
        self.rejected.insert(pod.uid().clone());
        self.shared.change(|state| state.entries.remove(pod.uid()));
    }

    /// Returns the metric callback of one preemption: call it once per killed victim (spec 08 §4.8).
    pub fn victims_of(&self, admitted: &Admission) -> impl Fn() + Send + Sync + use<> {
        let counter = self.deps.admission.preemptions.with_label_values(&[admitted.signal.as_str()]);
        move || counter.inc()
    }

    /// Removes all state of a deleted pod. The checkpoint follows with the next write.
    pub fn forget(&mut self, pod: &PodUid) {
        self.rejected.remove(pod);
        self.restored.remove(pod);
        self.named.remove(pod);
        self.pending.retain(|uid| uid != pod);
        self.shared.change(|state| {
            state.entries.remove(pod);
            state.conditions.remove(pod);
        });
    }

    /// Removes the state of all pods that are not desired, also from the checkpoint.
    pub fn retain(&mut self, desired: &HashSet<PodUid>) {
        self.rejected.retain(|uid| desired.contains(uid));
        self.restored.retain(|uid| desired.contains(uid));
        self.named.retain(|uid| desired.contains(uid));
        self.pending.retain(|uid| desired.contains(uid));
        let went = self.shared.change(|state| {
            let before = state.entries.len();
            state.entries.retain(|uid, _| desired.contains(uid));
            state.conditions.retain(|uid, _| desired.contains(uid));
            state.entries.len() != before
        });
        if went {
            self.writer.schedule_write();
        }
    }

    /// Takes over the conditions of a newly admitted pod, and adds it to the pending list if it
    /// requests other resources than allocated. Call [`Allocator::retry`] after all pods are added.
    pub fn added(&mut self, pod: &Pod) {
        self.shared.seed(pod);
        if self.shared.wants_resize(pod) {
            self.push(pod.uid());
        }
    }

    /// Processes an update of a pod: counts the requested changes; returns whether to retry resizes.
    pub fn updated(&mut self, old: &Pod, new: &Pod) -> bool {
        let changes = requested_changes(old, new);
        for change in &changes {
            let labels = [change.resource, change.requirement, change.operation];
            self.deps.allocation.requested.with_label_values(&labels).inc();
        }
        let level = |pod: &Pod| pod.spec().resources.clone();
        if changes.is_empty() && level(old) == level(new) {
            return false;
        }
        if self.shared.wants_resize(new) {
            self.push(new.uid());
            return true;
        }
        self.pending.retain(|uid| uid != new.uid());
        self.clear_pending(new.uid());
        false
    }

    /// Whether any resize is pending.
    pub fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Attempts all pending resizes in priority order.
    pub async fn retry(&mut self, retry: Retry<'_>) -> RetryResult {
        if !retry.sources_ready {
            return RetryResult { next: RETRY_FIRST, ..RetryResult::default() };
        }
        if retry.trigger == Trigger::Periodic {
            self.named.clear();
        }
        let mut done = RetryResult { next: RETRY, ..RetryResult::default() };
        for pod in self.take_pending(retry.active) {
            if self.attempt(&pod, &retry, &mut done).await {
                self.pending.push(pod.uid().clone());
            }
        }
        done
    }

    fn push(&mut self, pod: &PodUid) {
        if !self.pending.contains(pod) {
            self.pending.push(pod.clone());
        }
    }

    fn clear_pending(&self, pod: &PodUid) -> bool {
        self.shared.change(|state| state.conditions.get_mut(pod).and_then(|c| c.pending.take()).is_some())
    }

    /// Empties the pending list; returns its pods that are still active, in priority order.
    fn take_pending(&mut self, active: &[Arc<Pod>]) -> Vec<Arc<Pod>> {
        let known: HashMap<&PodUid, &Arc<Pod>> = active.iter().map(|p| (p.uid(), p)).collect();
        let found = std::mem::take(&mut self.pending).into_iter().filter_map(|uid| known.get(&uid).copied());
        let pods: Vec<(Arc<Pod>, Arc<Pod>)> = found.map(|p| (p.clone(), self.shared.allocated(p))).collect();
        let mut waiting: Vec<PendingResize<'_>> = pods
            .iter()
            .map(|(desired, allocated)| PendingResize { desired, allocated, since: self.pending_since(desired.uid()) })
            .collect();
        order(&mut waiting);
        waiting.iter().filter_map(|w| known.get(w.desired.uid()).map(|p| (*p).clone())).collect()
    }

    fn pending_since(&self, pod: &PodUid) -> Option<Timestamp> {
        self.shared.read(|state| state.conditions.get(pod)?.pending.as_ref().map(|c| c.since))
    }

    /// Attempts one resize; returns whether it stays pending.
    async fn attempt(&mut self, pod: &Arc<Pod>, retry: &Retry<'_>, done: &mut RetryResult) -> bool {
        let uid = pod.uid();
        if !self.shared.wants_resize(pod) {
            if self.clear_pending(uid) {
                done.changed.push(uid.clone());
            }
            return false;
        }
        let allocated = self.shared.allocated(pod);
        match self.ask(pod, Purpose::Resize { allocated: &allocated }, retry.active, retry.node) {
            Ok(admitted) if !admitted.victims.is_empty() => {
                self.preempt_for(pod, admitted, done);
                true
            }
            Ok(_) => match self.allocate_cpus(pod, &allocated, retry.devices) {
                Ok(()) => self.grant(pod, retry.trigger, done).await,
                Err(refusal) => self.set_pending(pod, &refusal, done),
            },
            Err(refusal) => self.set_pending(pod, &refusal, done),
        }
    }

    /// Allocates the exclusive CPUs that a resize requires. Unlike the reference, after the other handlers have agreed.
    fn allocate_cpus(&self, pod: &Pod, allocated: &Pod, devices: &dyn PodDevices) -> Result<(), AdmissionRejection> {
        match self.deps.rules.resize.allocates_cpus && changes_exclusive_cpus(pod, allocated) {
            true => devices.admit_resize(pod).map_err(|refusal| AdmissionRejection::failed_allocation(&refusal)),
            false => Ok(()),
        }
    }

    fn preempt_for(&mut self, pod: &Pod, mut admitted: Admission, done: &mut RetryResult) {
        admitted.victims.retain(|victim| self.named.insert(victim.uid().clone()));
        if !admitted.victims.is_empty() {
            warn!(pod = %pod.object_name(), signal = %admitted.signal, "Preempting pods to resize critical pod");
            done.preempt.push(Preempt { pod: pod.uid().clone(), admitted });
        }
    }

    async fn grant(&mut self, pod: &Arc<Pod>, trigger: Trigger, done: &mut RetryResult) -> bool {
        if let Err(e) = self.write_with(pod).await {
            error!(err = %e, pod = %pod.object_name(), "Failed to store allocated resources of resized pod");
            return true;
        }
        if self.shared.is_deferred(pod.uid()) {
            self.deps.allocation.deferred_accepted.with_label_values(&[trigger.as_str()]).inc();
        }
        let now = self.deps.clock.now();
        self.shared.change(|state| {
            state.entries.insert(pod.uid().clone(), PodResources::of(pod));
            state.conditions.entry(pod.uid().clone()).or_default().start(pod.generation(), now);
        });
        info!(pod = %pod.object_name(), trigger = trigger.as_str(), "Pod resize accepted");
        let text = format!("Pod resize started: {}", summary(pod, ""));
        self.deps.events.record(EventRecord::normal(pod.id(), "ResizeStarted", text));
        done.changed.push(pod.uid().clone());
        false
    }

    fn set_pending(&mut self, pod: &Pod, refusal: &AdmissionRejection, done: &mut RetryResult) -> bool {
        let is_final = refusal.reason == "Infeasible";
        let reason = if is_final { PendingReason::Infeasible } else { PendingReason::Deferred };
        if let Some(detail) = refusal.detail {
            self.deps.allocation.infeasible.with_label_values(&[detail]).inc();
        }
        let now = self.deps.clock.now();
        let changed = self.shared.change(|state| {
            let conditions = state.conditions.entry(pod.uid().clone()).or_default();
            conditions.set_pending(reason, &refusal.message, pod.generation(), now)
        });
        if changed {
            let text = format!("Pod resize {}: {}", refusal.reason, summary(pod, ""));
            self.deps.events.record(EventRecord::warning(pod.id(), reason.event_reason(), text));
            done.changed.push(pod.uid().clone());
        }
        !is_final
    }

    fn ask(
        &self,
        pod: &Arc<Pod>,
        purpose: Purpose<'_>,
        active: &[Arc<Pod>],
        node: &NodeFacts,
    ) -> Result<Admission, AdmissionRejection> {
        let active: Vec<Arc<Pod>> = active.iter().map(|p| self.shared.allocated(p)).collect();
        let (rejected, rules) = (&self.rejected, &self.deps.rules);
        admit(&AdmitInput { pod, purpose, active: &active, rejected, node, rules })
    }

    /// Writes the checkpoint with the pod's requested resources; the state in memory is unchanged.
    async fn write_with(&self, pod: &Arc<Pod>) -> io::Result<()> {
        let mut entries = self.shared.read(|state| state.entries.clone());
        entries.insert(pod.uid().clone(), PodResources::of(pod));
        self.writer.write(entries).await
    }
}
