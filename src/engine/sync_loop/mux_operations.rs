//! Sync loop handlers of mux operations: additions, updates, removals, admission, resize retries.
//!
//! Implements spec 02a §4, §8.

use std::{collections::HashSet, sync::Arc, time::Duration};

use tokio::time::{Instant, timeout};
use tracing::{debug, error, info, warn};

use super::{SyncLoop, SyncLoopCommand, kill_and_wait, records::PodWorkerRecord};
use crate::engine::{
    admission::{Admission, AdmissionRejection, missing_for_update, preemption},
    allocation::{Candidate, Preempt, Retry, RuntimePresence, Trigger, resize::has_shrunk},
    lifecycle::{Lifecycle, StatusOverride, StopCause},
    worker::{self, SyncPodType},
    worker_status::StartWait,
};
use berth_ports::{AllocationRefusal, DeviceAdmission, EventRecord, NodeFacts};
use berth_status::{conditions::readiness_gates_changed, previous_status::starts_after};
use berth_types::{Operation, Pod, PodChange, PodUid, api, qos::Qos};

/// How long an update of the node's labels may lag behind the pod that needs it.
const FRESH: Duration = Duration::from_secs(1);

impl SyncLoop {
    /// Handles one operation of the mux.
    pub(super) async fn on_change(&mut self, change: PodChange) {
        let names: Vec<String> = change.pods.iter().map(|p| p.object_name()).collect();
        debug!(source = change.source.as_str(), operation = ?change.operation, pods = ?names, "SyncLoop");
        match change.operation {
            Operation::Add => self.on_additions(change.pods).await,
            Operation::Update | Operation::Delete => {
                for pod in change.pods {
                    self.on_update(pod).await;
                }
            }
            Operation::Remove => {
                for pod in change.pods {
                    self.on_removal(&pod).await;
                }
            }
            Operation::Reconcile => self.on_reconcile(change.pods).await,
        }
        if self.ready.mark_ready(change.source) {
            self.changed = true;
            info!(source = change.source.as_str(), "Pod source is ready");
        }
    }

    async fn on_additions(&mut self, mut added: Vec<Arc<Pod>>) {
        added.sort_by_key(|pod| pod.metadata.creation_timestamp.clone());
        for pod in added {
            self.pods.upsert(pod.clone());
            self.changed = true;
            if pod.is_mirror() {
                self.resync_pod_of(&pod);
            } else {
                self.add(pod).await;
            }
        }
        self.retry_resizes(Trigger::PodsAdded).await;
    }

    /// Admits a new pod and dispatches it to a worker.
    pub(super) async fn add(&mut self, pod: Arc<Pod>) {
        self.add_ignoring(pod, &[]).await;
    }

    /// As [`SyncLoop::add`], but ignores the pods in `ending`: they were already preempted for this
    /// pod.
    pub(super) async fn add_ignoring(&mut self, pod: Arc<Pod>, ending: &[PodUid]) {
        let stopping = self.records.get(pod.uid()).is_some_and(PodWorkerRecord::is_stopping);
        if stopping || pod.is_api_terminal() {
            self.dispatch(&pod, SyncPodType::Create);
            return;
        }
        // Pods that await preemption have no containers to kill: hide those that this pod may preempt.
        // All other pods count them, or the capacity being freed for them would be taken. A pod whose
        // devices are being allocated is not admitted yet: it counts for none.
        let is_hidden = |other: &Pod| match self.awaiting_admission.get(other.uid()) {
            Some((StartWait::Devices, _)) => true,
            Some(_) => preemption::may_preempt(&pod, other),
            None => false,
        };
        let counts = |other: &Arc<Pod>| !is_hidden(other) && !ending.contains(other.uid());
        let active: Vec<Arc<Pod>> = self.active_pods().into_iter().filter(counts).collect();
        let node = self.context.node.borrow().clone();
        let presence = if self.runs_already(&pod) { RuntimePresence::Running } else { RuntimePresence::Absent };
        let candidate = Candidate { pod: &pod, presence, active: &active, node: &node };
        if let Err(refusal) = self.allocator.precheck(candidate) {
            return self.reject(&pod, &refusal);
        }
        match self.admit_devices(&pod, presence) {
            DeviceAdmission::Allocated => {}
            DeviceAdmission::Pending(plugin) => return self.await_devices(&pod, plugin, ending.to_vec()),
            DeviceAdmission::Rejected(refusal) => {
                let AllocationRefusal { message, detail, .. } = &refusal;
                info!(pod = %pod.object_name(), podUID = %pod.uid(), err = %message, ?detail, "Failed to allocate resources");
                return self.reject(&pod, &AdmissionRejection::failed_allocation(&refusal));
            }
        }
        let node = self.with_own_devices(&pod, node.clone());
        match self.allocator.admit(Candidate { node: &node, ..candidate }) {
            Ok(admitted) if admitted.victims.is_empty() => {
                self.rejected.remove(pod.uid());
                self.allocator.added(&pod);
                self.dispatch(&pod, SyncPodType::Create);
            }
            Ok(admitted) => {
                self.awaiting_admission.insert(pod.uid().clone(), (StartWait::Preemption, Instant::now()));
                self.changed = true;
                self.preempt(Some(pod), admitted, ending.to_vec());
            }
            Err(refusal) if refusal.is_node_affinity_only() && self.may_retry_admission(&pod) => {
                self.retry_admission(pod, ending.to_vec())
            }
            Err(refusal) => self.reject(&pod, &refusal),
        }
    }

    pub(super) fn admit_devices(&self, pod: &Arc<Pod>, presence: RuntimePresence) -> DeviceAdmission {
        // What the node has granted counts: a pod with a pending resize would lose its exclusive CPUs after a restart.
        let pod = self.allocator.allocated(pod);
        let active = || self.ready.all().then(|| self.pods_with_resources(&pod));
        self.context.devices.admit(&pod, presence == RuntimePresence::Running, &active)
    }

    /// Pods that keep their resources while a pod is admitted: active ones, and those whose containers are still being
    /// stopped. A pod with the same full name has stopped before the new one starts.
    fn pods_with_resources(&self, candidate: &Pod) -> HashSet<PodUid> {
        let stopping = self
            .records
            .iter()
            .filter(|(_, record)| !record.life.is_terminated() && record.id.full_name() != candidate.full_name());
        let active = self.active_pods();
        active.iter().map(|pod| pod.uid()).chain(stopping.map(|(uid, _)| uid)).cloned().collect()
    }

    /// Admits a pod again once its devices are allocated. `plugin` is the resource whose device plugin has to register
    /// first, if that is the cause: the pod's status and an event name it.
    pub(super) fn await_devices(&mut self, pod: &Arc<Pod>, plugin: Option<String>, ending: Vec<PodUid>) {
        self.awaiting_admission.insert(pod.uid().clone(), (StartWait::Devices, Instant::now()));
        self.changed = true;
        if let Some(resource) = plugin {
            let message = format!("waiting for device plugin {resource} to register");
            let status = worker::waiting_status(&self.context, pod, "WaitingForDevicePlugin", &message);
            self.context.status.set(pod, status, self.context.clock.now());
            self.context.events.record(EventRecord::normal(pod.id(), "WaitingForDevicePlugin", message));
        }
        let (devices, commands, pod) = (self.context.devices.clone(), self.commands.clone(), pod.clone());
        self.context.tasks.spawn(async move {
            devices.settled(pod.uid()).await;
            let _ = commands.send(SyncLoopCommand::RetryAdmission { pod, ending }).await; // the sync loop may have ended
        });
    }

    /// Node facts for the fit test of a pod: devices that pods have count as allocatable even if fewer are healthy now,
    /// and the node object may not list a new plugin's devices yet (spec 06c §1.10).
    fn with_own_devices(&self, pod: &Pod, mut node: Arc<NodeFacts>) -> Arc<NodeFacts> {
        for (resource, number) in self.context.devices.allocatable(pod.uid()) {
            let allocatable = node.allocatable.get(&resource).and_then(|text| text.parse().ok()).unwrap_or(0_u64);
            if node.allocatable.contains_key(&resource) && allocatable < number {
                Arc::make_mut(&mut node).allocatable.insert(resource, number.to_string());
            }
        }
        node
    }

    /// Whether a node affinity rejection may come from a stale node object: pods and the node have
    /// separate watches, so a pod can arrive before the label it needs. True once per pod.
    fn may_retry_admission(&mut self, pod: &Pod) -> bool {
        self.context.config.api_client && self.retried_admission.insert(pod.uid().clone())
    }

    /// Retries admission when the node's labels change, or after [`FRESH`] (spec 02a §6.2).
    fn retry_admission(&mut self, pod: Arc<Pod>, ending: Vec<PodUid>) {
        self.awaiting_admission.insert(pod.uid().clone(), (StartWait::NodeLabels, Instant::now()));
        self.changed = true;
        let (mut node, commands) = (self.context.node.clone(), self.commands.clone());
        let labels = node.borrow().labels.clone();
        self.context.tasks.spawn(async move {
            // A timeout retries as well: the rejection is then final.
            let _ = timeout(FRESH, node.wait_for(|facts| facts.labels != labels)).await;
            let _ = commands.send(SyncLoopCommand::RetryAdmission { pod, ending }).await; // the sync loop may have ended
        });
    }

    pub(super) fn reject(&mut self, pod: &Arc<Pod>, refusal: &AdmissionRejection) {
        warn!(pod = %pod.object_name(), podUID = %pod.uid(), reason = %refusal.reason, err = %refusal.message, "Pod was rejected");
        self.allocator.reject(pod, refusal);
        self.context.devices.release(pod.uid());
        let status = api::PodStatus {
            phase: Some("Failed".to_owned()),
            qos_class: Some(Qos::of(pod).as_str().to_owned()),
            reason: Some(refusal.reason.to_string()),
            message: Some(refusal.status_message()),
            ..Default::default()
        };
        self.context.status.set_stopped(pod, status, self.context.clock.now());
        self.rejected.insert(pod.uid().clone());
    }

    /// Attempts pending resizes and dispatches the results.
    pub(super) async fn retry_resizes(&mut self, trigger: Trigger) {
        if !self.allocator.has_pending() {
            return;
        }
        let active = self.active_pods();
        let node = self.context.node.borrow().clone();
        let (sources_ready, devices) = (self.ready.all(), &*self.context.devices);
        let retry = Retry { trigger, sources_ready, active: &active, node: &node, devices };
        let done = self.allocator.retry(retry).await;
        self.retry_at = Instant::now() + done.next;
        for uid in done.changed {
            if let Some(pod) = self.pods.pod(&uid).cloned() {
                self.dispatch(&pod, SyncPodType::Update);
            }
        }
        for Preempt { admitted, .. } in done.preempt {
            self.preempt(None, admitted, Vec::new());
        }
    }

    /// Kills the victims of a critical pod in a separate task; then `pod`, if given, is admitted again.
    /// `ending` lists victims of earlier attempts, which are ignored again.
    fn preempt(&mut self, pod: Option<Arc<Pod>>, admitted: Admission, mut ending: Vec<PodUid>) {
        let commands = self.commands.clone();
        let events = self.context.events.clone();
        let count = self.allocator.victims_of(&admitted);
        self.context.tasks.spawn(async move {
            ending.extend(admitted.victims.iter().map(|victim| victim.uid().clone()));
            for victim in admitted.victims {
                events.record(EventRecord::warning(victim.id(), preemption::REASON, preemption::MESSAGE));
                let status = StatusOverride {
                    reason: preemption::REASON.to_owned(),
                    message: preemption::MESSAGE.to_owned(),
                    disruption: Some((
                        preemption::CONDITION_REASON.to_owned(),
                        preemption::CONDITION_MESSAGE.to_owned(),
                    )),
                    keeps_success: false,
                    is_unready: false,
                    status_reserve: Duration::ZERO,
                };
                match kill_and_wait(&commands, &victim, StopCause::Evicted, None, Some(status)).await {
                    Ok(()) => count(),
                    Err(text) => {
                        let message = "Container runtime did not kill the pod within specified grace period.";
                        events.record(EventRecord::warning(victim.id(), "ExceededGracePeriod", message));
                        error!(pod = %victim.object_name(), err = %text, "Preemption: pod failed to evict");
                    }
                }
            }
            if let Some(pod) = pod {
                let _ = commands.send(SyncLoopCommand::RetryAdmission { pod, ending }).await; // the sync loop may have ended
            }
        });
    }

    async fn on_update(&mut self, pod: Arc<Pod>) {
        let old = self.pods.pod(pod.uid()).cloned();
        self.pods.upsert(pod.clone());
        self.changed = true;
        if pod.is_mirror() {
            self.resync_pod_of(&pod);
            return;
        }
        if let Some(old) = &old {
            let node = self.context.node.borrow().clone();
            if let Some(text) = missing_for_update(old, &pod, &node.declared_features) {
                self.context.events.record(EventRecord::warning(pod.id(), "FailedNodeDeclaredFeaturesCheck", text));
            }
        }
        if old.is_some_and(|old| self.allocator.updated(&old, &pod)) {
            self.retry_resizes(Trigger::PodUpdated).await;
        }
        // A rejected pod stays rejected until it is deleted; only its deletion is dispatched. A pod
        // that awaits preemption is admitted, in its then current version, once the victims are
        // stopped.
        let waits = self.awaiting_admission.contains_key(pod.uid());
        if !(waits || self.rejected.contains(pod.uid())) || pod.is_deleting() {
            self.dispatch(&pod, SyncPodType::Update);
        }
    }

    async fn on_removal(&mut self, pod: &Arc<Pod>) {
        self.pods.remove(pod);
        self.changed = true;
        if pod.is_mirror() {
            self.resync_pod_of(pod);
            return;
        }
        self.rejected.remove(pod.uid());
        self.retried_admission.remove(pod.uid());
        self.allocator.forget(pod.uid());
        if self.records.contains_key(pod.uid()) {
            self.stop_unwanted(pod.uid());
        } else {
            self.context.status.forget(pod.uid());
            self.context.devices.release(pod.uid());
        }
        self.retry_resizes(Trigger::PodsRemoved).await;
    }

    /// Handles pods of which only the API status changed.
    async fn on_reconcile(&mut self, pods: Vec<Arc<Pod>>) {
        let mut trigger = None;
        for pod in pods {
            let old = self.pods.pod(pod.uid()).cloned();
            self.pods.upsert(pod.clone());
            self.changed = true;
            if pod.is_mirror() {
                self.apply_mirror_status(&pod);
            } else if let Some(old) = old {
                if let Some(shown) = &pod.status {
                    self.context.status.share(pod.uid(), shown);
                }
                trigger = trigger.or_else(|| self.freed(&old, &pod));
                self.reconcile(&old, &pod);
            }
        }
        if let Some(trigger) = trigger {
            self.retry_resizes(trigger).await;
        }
    }

    /// Whether a change of this pod may have freed resources for a pending resize.
    fn freed(&self, old: &Arc<Pod>, new: &Arc<Pod>) -> Option<Trigger> {
        if new.is_api_terminal() && !old.is_api_terminal() {
            return Some(Trigger::PodTerminated);
        }
        let (old, new) = (self.allocator.allocated(old), self.allocator.allocated(new));
        has_shrunk(&old, &new).then_some(Trigger::PodResized)
    }

    fn reconcile(&mut self, old: &Pod, new: &Arc<Pod>) {
        // A rejected pod, or one that awaits preemption, has no record and must not get one.
        let is_refused = self.rejected.contains(new.uid());
        if new.is_api_terminal() && !old.is_api_terminal() && !is_refused {
            self.dispatch(new, SyncPodType::Update);
        } else if readiness_gates_changed(old, new) && self.records.contains_key(new.uid()) {
            self.dispatch(new, SyncPodType::Sync);
        }
        if new.is_evicted()
            && let Some(observed) = self.context.observer.known_pod(new.uid())
        {
            self.context.runtime.prune(&observed, None, true);
        }
    }

    /// A mirror pod that was created without a status may receive one that an earlier agent, or an
    /// earlier lifecycle of the pod, published.
    fn apply_mirror_status(&mut self, mirror: &Pod) {
        let Some(pod) = self.pods.pod_of_mirror(mirror).cloned() else { return };
        let Some(mirror_status) = self.pods.mirror_status(&pod) else { return };
        let knows = |record: &PodWorkerRecord| {
            let known = record.pod.as_ref().and_then(|pod| pod.status.as_deref());
            known.is_some_and(|status| status.start_time.is_some())
        };
        let knows = self.records.get(pod.uid()).is_none_or(knows);
        let status = self.context.status.status(pod.uid());
        if !knows && status.is_none_or(|kept| starts_after(&kept, mirror_status)) {
            self.dispatch(&pod, SyncPodType::Update);
        }
    }

    fn resync_pod_of(&mut self, mirror: &Pod) {
        if let Some(pod) = self.pods.pod_of_mirror(mirror).cloned() {
            self.dispatch(&pod, SyncPodType::Update);
        }
    }

    /// Desired pods that count for admission: not terminated, not rejected (spec 02 §2).
    pub(super) fn active_pods(&self) -> Vec<Arc<Pod>> {
        let counts = |pod: &&Arc<Pod>| {
            let uid = pod.uid();
            let life = self.records.get(uid).map(|record| &record.life);
            !self.rejected.contains(uid)
                && !life.is_some_and(Lifecycle::is_terminated)
                && (!pod.is_api_terminal() || life.is_some_and(Lifecycle::is_stopping))
        };
        self.pods.pods().filter(counts).cloned().collect()
    }

    /// Whether the runtime already runs this pod (the agent was restarted).
    fn runs_already(&self, pod: &Pod) -> bool {
        self.context.observer.known_pod(pod.uid()).is_some_and(|observed| observed.running().next().is_some())
    }
}
