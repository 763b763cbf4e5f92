//! What others ask of the sync loop: a turn, a kill, a description.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};

use super::{
    SyncLoop,
    records::{Record, State, send},
};
use crate::engine::{
    grace::kill_wait,
    lifecycle::{Lifecycle, StatusOverride, StopCause, StopOrder},
    standings::Standing,
    worker::Cause,
};
use berth_ports::{Stage, StageView};
use berth_types::{Pod, PodRef, PodUid};

/// What others ask of the sync loop.
#[derive(Debug)]
pub enum Command {
    /// Take another turn of that pod (a probe said something new).
    Poke(PodUid),
    /// Kill a pod: eviction, preemption, shutdown. The answer is its life, to be watched.
    Kill {
        /// Which.
        uid: PodUid,
        /// Why: what it leaves may go with it, or stays.
        cause: StopCause,
        /// Overrides the grace period, whole seconds.
        grace: Option<i64>,
        /// What the status shall say.
        status: Option<StatusOverride>,
        /// `None` where no such pod is worked on.
        reply: oneshot::Sender<Option<watch::Receiver<Lifecycle>>>,
    },
    /// Admits a pod again: others have been preempted for it, or the node's labels have changed.
    RetryAdmission {
        /// The pod.
        pod: Arc<Pod>,
        /// Those that were told to end, also where they would not.
        ending: Vec<PodUid>,
    },
    /// What every worker is doing.
    Describe(oneshot::Sender<Vec<WorkerView>>),
    /// What a sweep found on disk and in the cgroup tree.
    Swept(Found),
    /// What was found of that pod is removed, or cannot be.
    SweepDone(PodUid),
}

/// What is found of pods outside the runtime.
#[derive(Debug, Default)]
pub struct Found {
    /// Pods with a directory.
    pub directories: Vec<PodUid>,
    /// Pods with a cgroup.
    pub cgroups: Vec<PodUid>,
}

/// One worker, for `why` and the server.
#[derive(Clone, Debug)]
pub struct WorkerView {
    /// Which pod.
    pub id: PodRef,
    /// Where it is in its life.
    pub life: Lifecycle,
    /// What it waits for; `None` where it stands in line or is finished.
    pub stage: Option<StageView>,
}

impl SyncLoop {
    pub(super) async fn on_command(&mut self, command: Command) {
        match command {
            Command::Poke(uid) => {
                if let Some(record) = self.records.get_mut(&uid) {
                    send(record, Cause::Sync);
                }
            }
            Command::Kill { uid, cause, grace, status, reply } => {
                let order = StopOrder { cause, grace_override: grace, status };
                self.stop(&uid, order);
                let life = self.records.get(&uid).and_then(|record| match &record.state {
                    State::Working(handle) => Some(handle.life.clone()),
                    State::Waiting(..) | State::Finished => None,
                });
                let _ = reply.send(life); // who asked may be gone
            }
            Command::RetryAdmission { pod, ending } => {
                self.changed |= self.awaiting_admission.remove(pod.uid()).is_some();
                let begun = self.records.contains_key(pod.uid()); // its deletion
                if let Some(pod) = self.pods.pod(pod.uid()).filter(|_| !begun).cloned() {
                    self.add_beside(pod, &ending).await;
                }
            }
            Command::Describe(reply) => {
                let _ = reply.send(self.describe()); // who asked may be gone
            }
            Command::Swept(found) => self.on_swept(found),
            Command::SweepDone(uid) => {
                self.sweeping.remove(&uid);
                self.try_start(&uid, Cause::Create);
            }
        }
    }

    fn describe(&self) -> Vec<WorkerView> {
        let view = |record: &Record| {
            let standing = record.standing();
            let stage = standing.stage.as_ref().map(Stage::view);
            let Standing { id, life, .. } = standing;
            WorkerView { id, life, stage }
        };
        self.records.values().map(view).collect()
    }
}

/// Kills a pod and waits until nothing of it runs: at most max(10 s, 1.5 × grace) (spec 02a §7).
///
/// # Errors
/// `timeout waiting to kill pod`.
pub async fn kill_and_wait(
    commands: &mpsc::Sender<Command>,
    pod: &Pod,
    cause: StopCause,
    grace: Option<i64>,
    status: Option<StatusOverride>,
) -> Result<(), String> {
    let limit = kill_wait(grace, pod.spec().termination_grace_period_seconds);
    let (reply, answer) = oneshot::channel();
    let closed = || "the sync loop is gone".to_owned();
    let kill = Command::Kill { uid: pod.uid().clone(), cause, grace, status, reply };
    commands.send(kill).await.map_err(|_| closed())?;
    let Some(mut life) = answer.await.map_err(|_| closed())? else { return Ok(()) };
    match tokio::time::timeout(limit, life.wait_for(Lifecycle::is_terminated)).await {
        Ok(_) => Ok(()), // a worker that is gone runs nothing
        Err(_) => Err("timeout waiting to kill pod".to_owned()),
    }
}
