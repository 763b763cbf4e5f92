//! Commands to the sync loop: resync, kill, retry admission, describe, sweep results.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};

use super::{
    SyncLoop,
    records::{PodWorkerRecord, RecordState, send},
};
use crate::engine::{
    grace::kill_wait,
    lifecycle::{Lifecycle, StatusOverride, StopCause, StopRequest},
    worker::SyncPodType,
    worker_status::PodWorkerStatus,
};
use berth_ports::{PodProgress, StepView};
use berth_types::{Pod, PodRef, PodUid};

/// Request of another task to the sync loop.
#[derive(Debug)]
pub enum SyncLoopCommand {
    /// Resyncs the pod (for example, after a probe result changed).
    Resync(PodUid),
    /// Kills a pod for eviction, preemption, or shutdown; replies with a watch on its lifecycle.
    Kill {
        /// UID of the pod.
        uid: PodUid,
        /// Cause of the kill; determines whether the pod's content is removed or kept.
        cause: StopCause,
        /// Grace period override in whole seconds.
        grace: Option<i64>,
        /// Final status that overrides the computed one.
        status: Option<StatusOverride>,
        /// Receives the watch; `None` if the pod has no worker.
        reply: oneshot::Sender<Option<watch::Receiver<Lifecycle>>>,
    },
    /// Admits a pod again after its victims were preempted, or the node's labels changed.
    RetryAdmission {
        /// The pod to admit.
        pod: Arc<Pod>,
        /// UIDs of the preempted victims, including those that did not stop in time.
        ending: Vec<PodUid>,
    },
    /// Describes all workers.
    Describe(oneshot::Sender<Vec<WorkerView>>),
    /// A sweep has listed pod directories and pod cgroups.
    SweepResult(Leftovers),
    /// The leftovers of that pod are removed, or their removal failed.
    SweepDone(PodUid),
}

/// Leftovers of pods outside the runtime.
#[derive(Debug, Default)]
pub struct Leftovers {
    /// Pods with a directory.
    pub directories: Vec<PodUid>,
    /// Pods with a cgroup.
    pub cgroups: Vec<PodUid>,
}

/// Description of one worker for `berth why` and the server.
#[derive(Clone, Debug)]
pub struct WorkerView {
    /// The pod.
    pub id: PodRef,
    /// Lifecycle state of the pod.
    pub life: Lifecycle,
    /// What the worker waits for; `None` while the pod has no worker yet or is finished.
    pub step: Option<StepView>,
}

impl SyncLoop {
    pub(super) async fn on_command(&mut self, command: SyncLoopCommand) {
        match command {
            SyncLoopCommand::Resync(uid) => {
                if let Some(record) = self.records.get_mut(&uid) {
                    send(record, SyncPodType::Sync);
                }
            }
            SyncLoopCommand::Kill { uid, cause, grace, status, reply } => {
                let order = StopRequest { cause, grace_override: grace, status };
                self.stop(&uid, order);
                let life = self.records.get(&uid).and_then(|record| match &record.state {
                    RecordState::Working(handle) => Some(handle.life.clone()),
                    RecordState::Waiting(..) | RecordState::Finished => None,
                });
                let _ = reply.send(life); // the requester may be gone
            }
            SyncLoopCommand::RetryAdmission { pod, ending } => {
                self.changed |= self.awaiting_admission.remove(pod.uid()).is_some();
                let begun = self.records.contains_key(pod.uid()); // its deletion has begun
                if let Some(pod) = self.pods.pod(pod.uid()).filter(|_| !begun).cloned() {
                    self.add_ignoring(pod, &ending).await;
                }
            }
            SyncLoopCommand::Describe(reply) => {
                let _ = reply.send(self.describe()); // the requester may be gone
            }
            SyncLoopCommand::SweepResult(found) => self.on_swept(found),
            SyncLoopCommand::SweepDone(uid) => {
                self.sweeping.remove(&uid);
                self.try_start(&uid, SyncPodType::Create);
            }
        }
    }

    fn describe(&self) -> Vec<WorkerView> {
        let view = |record: &PodWorkerRecord| {
            let standing = record.standing();
            let step = standing.progress.as_ref().map(PodProgress::view);
            let PodWorkerStatus { id, life, .. } = standing;
            WorkerView { id, life, step }
        };
        self.records.values().map(view).collect()
    }
}

/// Kills a pod and waits until none of its containers run: at most max(10 s, 1.5 × grace)
/// (spec 02a §7).
///
/// # Errors
/// `timeout waiting to kill pod`, or the sync loop has ended.
pub async fn kill_and_wait(
    commands: &mpsc::Sender<SyncLoopCommand>,
    pod: &Pod,
    cause: StopCause,
    grace: Option<i64>,
    status: Option<StatusOverride>,
) -> Result<(), String> {
    let limit = kill_wait(grace, pod.spec().termination_grace_period_seconds);
    let (reply, answer) = oneshot::channel();
    let closed = || "sync loop stopped".to_owned();
    let kill = SyncLoopCommand::Kill { uid: pod.uid().clone(), cause, grace, status, reply };
    commands.send(kill).await.map_err(|_| closed())?;
    let Some(mut life) = answer.await.map_err(|_| closed())? else { return Ok(()) };
    match tokio::time::timeout(limit, life.wait_for(Lifecycle::is_terminated)).await {
        Ok(_) => Ok(()), // if the worker is gone, nothing runs
        Err(_) => Err("timeout waiting to kill pod".to_owned()),
    }
}
