//! Pod worker records of the sync loop: creation, start order, stop, restart, and removal.
//!
//! A record exists from the first dispatch of a pod until it is finished and no longer desired
//! (spec 02a §9).

use std::sync::Arc;

use tokio::time::Instant;
use tracing::debug;

use super::SyncLoop;
use crate::engine::{
    admission::AdmissionRejection,
    allocation::RuntimePresence,
    lifecycle::{self, DesiredState, Lifecycle, StopCause, StopRequest},
    worker::{self, PodUpdate, Report, SyncPodType, WorkerHandle},
    worker_status::{PodWorkerStatus, StartWait},
};
use berth_ports::DeviceAdmission;
use berth_types::{Pod, PodFullName, PodRef, PodUid};

pub(super) enum RecordState {
    /// Waits for a worker: reason, and since when.
    Waiting(StartWait, Instant),
    /// Has a worker.
    Working(WorkerHandle),
    /// Its worker has finished.
    Finished,
}

pub(super) struct PodWorkerRecord {
    pub(super) id: PodRef,
    pub(super) pod: Option<Arc<Pod>>,
    pub(super) desired: DesiredState,
    pub(super) life: Lifecycle,
    pub(super) state: RecordState,
    pub(super) restart_requested: bool,
    /// Whether leftovers of its full name in the runtime have been checked.
    pub(super) leftovers_seen: bool,
}

impl PodWorkerRecord {
    /// Whether the pod is stopping: its worker has reported so, or was requested to stop.
    pub(super) fn is_stopping(&self) -> bool {
        self.life.is_stopping() || self.desired.stop.is_some()
    }

    /// Status of the pod for `berth why`.
    pub(super) fn standing(&self) -> PodWorkerStatus {
        let (progress, line) = match &self.state {
            RecordState::Working(handle) => (Some(handle.progress.clone()), None),
            RecordState::Waiting(line, since) => (None, Some((*line, *since))),
            RecordState::Finished => (None, None),
        };
        PodWorkerStatus { id: self.id.clone(), life: self.life.clone(), progress, line }
    }
}

impl SyncLoop {
    /// Dispatches the latest definition to the pod's worker; creates record and worker if needed.
    pub(super) fn dispatch(&mut self, pod: &Arc<Pod>, cause: SyncPodType) {
        let allocated = self.allocator.allocated(pod);
        // The API status of a static pod is that of its mirror pod.
        let allocated = match self.pods.mirror_status(pod) {
            Some(status) => Arc::new(allocated.with_status(status.clone())),
            None => allocated,
        };
        if let Some(record) = self.records.get_mut(pod.uid()) {
            if record.is_stopping() && cause == SyncPodType::Create {
                record.restart_requested = true;
                if record.life.is_finished() {
                    self.restart(&pod.uid().clone());
                }
                return;
            }
            record.pod = Some(allocated);
            send(record, cause);
            return;
        }
        // A pod that has not been observed may be alive: the first sync determines that.
        let alive = self.context.observer.may_be_alive(pod.uid());
        let record = PodWorkerRecord {
            id: pod.id().clone(),
            life: Lifecycle::first(pod.is_api_terminal(), alive),
            pod: Some(allocated),
            desired: DesiredState::default(),
            state: RecordState::Waiting(StartWait::Removal, Instant::now()),
            restart_requested: false,
            leftovers_seen: false,
        };
        self.records.insert(pod.uid().clone(), record);
        self.try_start(pod.uid(), cause);
    }

    /// Starts a record's worker unless it has to wait for its full name or for a removal.
    pub(super) fn try_start(&mut self, uid: &PodUid, cause: SyncPodType) {
        let Some(record) = self.records.get(uid) else { return };
        if !matches!(record.state, RecordState::Waiting(..)) {
            return;
        }
        if self.sweeping.contains(uid) {
            self.set_start_wait(uid, StartWait::Removal);
            return;
        }
        let is_static = record.pod.as_ref().is_some_and(|pod| pod.is_static());
        let (id, name) = (record.id.clone(), record.id.full_name());
        if is_static && !self.terminate_leftovers(uid, &name) {
            debug!(pod = %id.object_name(), podUID = %uid, "Static pod cannot start yet, runtime has not listed its pods");
            self.set_start_wait(uid, StartWait::Runtime);
            return;
        }
        if is_static && !self.order.enter(&name, uid) {
            debug!(pod = %id.object_name(), podUID = %uid, "Static pod cannot start yet, another pod with the same full name is terminating");
            self.set_start_wait(uid, StartWait::Name);
            return;
        }
        let Some(record) = self.records.get_mut(uid) else { return };
        let desired =
            PodUpdate { pod: record.pod.clone(), state: record.desired.clone(), cause, sent_at: Instant::now() };
        let handle = worker::spawn(self.context.clone(), record.id.clone(), record.life.clone(), desired);
        record.state = RecordState::Working(handle);
        self.changed = true;
    }

    /// Records what a waiting pod waits for; the time restarts if the reason changed.
    fn set_start_wait(&mut self, uid: &PodUid, line: StartWait) {
        let Some(record) = self.records.get_mut(uid) else { return };
        if let RecordState::Waiting(known, since) = &mut record.state
            && *known != line
        {
            (*known, *since) = (line, Instant::now());
            self.changed = true;
        }
    }

    /// A static pod that was changed while the agent was not running still runs under its old UID. That
    /// pod is terminated first, even if other sources are not ready (none of them can desire a static
    /// pod of the same name). Returns false until the runtime has listed its pods.
    fn terminate_leftovers(&mut self, uid: &PodUid, name: &PodFullName) -> bool {
        match self.records.get_mut(uid) {
            Some(record) if !record.leftovers_seen => {}
            _ => return true,
        }
        let Some(known) = self.context.observer.known() else { return false };
        if let Some(record) = self.records.get_mut(uid) {
            record.leftovers_seen = true;
        }
        let others = known.pods.into_iter().filter(|(other, _)| other != uid && !self.pods.contains(other));
        let alive = others.filter(|(_, observed)| observed.id.full_name() == *name && observed.is_alive());
        for (other, observed) in alive.collect::<Vec<_>>() {
            match self.records.get(&other) {
                None => {
                    self.order.enter(name, &other);
                    self.terminate_orphan(&observed);
                }
                Some(record) if record.pod.is_none() && !record.life.is_terminated() => {
                    self.order.enter(name, &other);
                }
                Some(_) => {}
            }
        }
        true
    }

    /// Requests the stop of a pod that is no longer desired, if its source is ready.
    pub(super) fn stop_unwanted(&mut self, uid: &PodUid) {
        let Some(record) = self.records.get(uid) else { return };
        let source = record.pod.as_ref().and_then(|pod| pod.source());
        if source.is_some_and(|source| !self.ready.is_ready(source)) {
            debug!(podUID = %uid, "Skipping delete because the source is not ready yet");
            return;
        }
        self.stop(uid, StopRequest { cause: StopCause::Deleted, grace_override: None, status: None });
    }

    pub(super) fn stop(&mut self, uid: &PodUid, order: StopRequest) {
        let Some(record) = self.records.get_mut(uid) else { return };
        record.restart_requested = false;
        let folded = lifecycle::merge_stop_requests(record.desired.stop.take(), order);
        record.desired.stop = Some(folded);
        match record.state {
            RecordState::Working(_) => send(record, SyncPodType::Kill),
            RecordState::Waiting(..) => {
                // Never started: nothing runs, no runtime call is needed.
                record.state = RecordState::Finished;
                record.life = Lifecycle::Finished { cause: StopCause::Deleted };
                self.leave_start_queue(uid);
                self.on_finished(uid);
            }
            RecordState::Finished => {
                record.life = record.life.clone().apply(&record.desired, record.pod.as_deref());
                self.on_finished(uid);
            }
        }
    }

    /// Handles a lifecycle report of a worker.
    pub(super) fn on_report(&mut self, report: Report) {
        let uid = &report.id.uid;
        let Some(record) = self.records.get_mut(uid) else { return };
        record.life = report.life;
        let (terminated, finished) = (record.life.is_terminated(), record.life.is_finished());
        if finished {
            record.state = RecordState::Finished;
            // The finished worker has not received, and no longer receives, updates sent in the
            // meantime.
            record.life = record.life.clone().apply(&record.desired, record.pod.as_deref());
        }
        self.changed = true;
        if terminated {
            self.leave_start_queue(uid);
        }
        if finished {
            self.on_finished(&uid.clone());
        }
    }

    fn leave_start_queue(&mut self, uid: &PodUid) {
        let Some(record) = self.records.get(uid) else { return };
        if let Some(next) = self.order.leave(&record.id.full_name(), uid) {
            self.try_start(&next, SyncPodType::Create);
        }
    }

    /// Removes the record of a finished pod that is no longer desired; restarts a pod that was
    /// re-added.
    fn on_finished(&mut self, uid: &PodUid) {
        let Some(record) = self.records.get(uid) else { return };
        if record.restart_requested {
            self.restart(uid);
        } else if !self.pods.contains(uid) {
            self.purge(uid);
        }
    }

    /// The same UID was added again: removes its first record and creates a second one, without
    /// admission.
    fn restart(&mut self, uid: &PodUid) {
        self.purge(uid);
        if let Some(pod) = self.pods.pod(uid).cloned() {
            let label = berth_metrics::static_label(pod.is_static());
            self.context.metrics.restarted_pods.with_label_values(&[label]).inc();
            self.context.status.forget(uid);
            // Its devices, CPUs, and memory may have been released with the first record.
            match self.admit_devices(&pod, RuntimePresence::Absent) {
                DeviceAdmission::Allocated => self.dispatch(&pod, SyncPodType::Create),
                DeviceAdmission::Pending(plugin) => self.await_devices(&pod, plugin, Vec::new()),
                DeviceAdmission::Rejected(refusal) => {
                    self.reject(&pod, &AdmissionRejection::failed_allocation(&refusal));
                }
            }
        }
    }

    fn purge(&mut self, uid: &PodUid) {
        self.leave_start_queue(uid);
        if self.records.remove(uid).is_none() {
            return;
        }
        self.context.runtime.forget(uid);
        if !self.pods.contains(uid) {
            self.context.status.forget(uid);
            self.allocator.forget(uid);
            self.context.devices.release(uid);
        }
        self.sweep_due = true;
        self.changed = true;
    }
}

pub(super) fn send(record: &PodWorkerRecord, cause: SyncPodType) {
    if let RecordState::Working(handle) = &record.state {
        let desired =
            PodUpdate { pod: record.pod.clone(), state: record.desired.clone(), cause, sent_at: Instant::now() };
        handle.desired.send_replace(desired);
    }
}
