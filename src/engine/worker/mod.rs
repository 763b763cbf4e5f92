//! Pod worker: an actor per pod with a latest-wins mailbox of the desired state.
//!
//! ```text
//!  sync loop ──desired (latest wins)──► worker ──one sync──► runtime, volumes, status
//!  pod store ──moved──────────────────►   │
//!  runtime state, timer ──────────────►   └──report──► sync loop
//! ```
//!
//! Each sync takes the desired state and an observation that began after the last action, gets the due
//! step from the pure [`Lifecycle`], executes it, and returns when to run again. Updates are applied
//! during a sync: a shorter grace period reaches a running kill, a stop request cancels pending starts.
//! Implements spec 02a §9.

mod context;
mod deadline;
mod pod_status;
mod pod_sync;
mod pod_termination;
mod prerequisites;
mod resize;

use std::{sync::Arc, time::Duration};

use rand::Rng;
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error};

pub use context::{EngineConfig, WorkerContext};
pub(super) use pod_status::waiting_status;

use super::{
    lifecycle::{DesiredState, Lifecycle},
    sync_delay::{self, SyncResult},
};
use berth_otel::{KeyValue, Scope, Span};
use berth_ports::{Grace, PodProgress, PodView};
use berth_types::{Pod, PodRef};

/// Cause of the latest message from the sync loop: label `operation_type`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SyncPodType {
    /// The pod is new.
    Create,
    /// Its definition changed.
    Update,
    /// The pod is to be resynced.
    Sync,
    /// The pod is to stop.
    Kill,
}

impl SyncPodType {
    /// The label's value.
    pub fn label(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Update => "update",
            Self::Sync => "sync",
            Self::Kill => "kill",
        }
    }
}

/// The latest desired state of one pod.
#[derive(Clone, Debug)]
pub struct PodUpdate {
    /// The pod with its allocated resources; `None` for a pod that only the runtime knows.
    pub pod: Option<Arc<Pod>>,
    /// Desired lifecycle state: stop requests.
    pub state: DesiredState,
    /// Cause of this message.
    pub cause: SyncPodType,
    /// When this message was sent to the worker.
    pub sent_at: Instant,
}

/// Lifecycle report of a worker to the sync loop.
#[derive(Clone, Debug)]
pub struct Report {
    /// The pod.
    pub id: PodRef,
    /// Its current lifecycle state.
    pub life: Lifecycle,
}

/// The sync loop's handle to a worker.
#[derive(Debug)]
pub struct WorkerHandle {
    /// Mailbox of the desired state.
    pub desired: watch::Sender<PodUpdate>,
    /// Lifecycle state of the pod, as the worker last published it.
    pub life: watch::Receiver<Lifecycle>,
    /// Progress of the worker.
    pub progress: PodProgress,
}

/// Spawns a worker; it runs until the pod is finished or the agent shuts down.
pub fn spawn(context: Arc<WorkerContext>, id: PodRef, first: Lifecycle, desired: PodUpdate) -> WorkerHandle {
    let progress = PodProgress::new();
    let (desired, mailbox) = watch::channel(desired);
    let (life_sender, life) = watch::channel(first.clone());
    let view = context.observer.view(&id);
    let mut worker = Worker {
        memory: pod_sync::WorkerState::new(id, progress.clone(), view),
        mailbox,
        life: first,
        life_sender,
        context: context.clone(),
    };
    context.tasks.spawn(async move { worker.run().await });
    WorkerHandle { desired, life, progress }
}

struct Worker {
    context: Arc<WorkerContext>,
    mailbox: watch::Receiver<PodUpdate>,
    life: Lifecycle,
    life_sender: watch::Sender<Lifecycle>,
    memory: pod_sync::WorkerState,
}

impl Worker {
    async fn run(&mut self) {
        let context = self.context.clone();
        let mut runtime_state = context.runtime_state.clone();
        let mut update_pending = true;
        // A finished worker reports once and then nothing: its UID may have been added a second time.
        while !self.life.is_finished() {
            let desired = {
                let word = self.mailbox.borrow_and_update();
                update_pending |= word.has_changed(); // an update may have arrived between two syncs
                word.clone()
            };
            self.apply(&desired).await;
            let _ = runtime_state.borrow_and_update();
            let begun = update_pending.then_some((desired.sent_at, desired.cause));
            let (end, updated) = tokio::select! {
                biased;
                () = context.shutdown.cancelled() => return,
                // Boxed: a worker is idle most of the time, and the sync future is the largest part of
                // it.
                end = Box::pin(self.turn(&desired, update_pending)) => end,
            };
            drop(desired); // do not keep the message alive while the worker is idle
            if let Some((handed_at, cause)) = begun {
                context.metrics.worker_duration(cause.label(), handed_at.elapsed());
            }
            if updated || end == SyncResult::SyncAgain {
                update_pending = updated;
                continue;
            }
            let mut wait = sync_delay::delay(&end, context.config.sync_frequency, rand::rng().random());
            if self.life == Lifecycle::Syncing
                && let Some(left) = pod_sync::SyncContext::until_deadline(&context, &self.memory)
            {
                wait = wait.min(left);
            }
            self.rest(&end, wait);
            update_pending = false;
            tokio::select! {
                biased;
                () = context.shutdown.cancelled() => return,
                changed = self.mailbox.changed() => match changed {
                    Ok(()) => update_pending = true,
                    Err(_) => return, // the sync loop has ended
                },
                () = moved(&mut self.memory.view, sync_delay::observation_delay(&end)) => {}
                Ok(()) = runtime_state.changed(), if self.memory.blocked_on_runtime => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
        self.memory.progress.pause("finished", None);
    }

    /// Shows what the next sync waits for.
    fn rest(&self, end: &SyncResult, wait: Duration) {
        let name = end.waits_for(self.memory.blocked_on_runtime);
        self.memory.progress.pause(name, (*end != SyncResult::Settled).then(|| Instant::now() + wait));
    }

    /// Applies the latest desired state; reports a lifecycle transition to the sync loop.
    async fn apply(&mut self, desired: &PodUpdate) {
        let next = self.life.clone().apply(&desired.state, desired.pod.as_deref());
        self.enter(next).await;
    }

    async fn enter(&mut self, next: Lifecycle) {
        if next == self.life {
            return;
        }
        debug!(pod = %self.memory.id.object_name(), podUID = %self.memory.id.uid, from = self.life.label(), to = next.label(), "Pod worker changed state");
        self.life = next.clone();
        self.life_sender.send_replace(next.clone());
        let report = Report { id: self.memory.id.clone(), life: next };
        if self.context.reports.send(report).await.is_err() {
            debug!(pod = %self.memory.id.object_name(), "Sync loop stopped, dropping pod worker report");
        }
    }

    /// Runs one sync; also returns whether an update arrived in the meantime.
    async fn turn(&mut self, desired: &PodUpdate, update_pending: bool) -> (SyncResult, bool) {
        let stopping = CancellationToken::new();
        let (grace, grace_seen) = watch::channel(self.grace());
        let turn = pod_sync::SyncContext {
            context: &self.context,
            memory: &mut self.memory,
            pod: desired.pod.clone(),
            update_pending,
        };
        let order = desired.state.stop.as_ref().and_then(|stop| stop.status.clone());
        let running = UpdateListener { mailbox: &mut self.mailbox, stopping: stopping.clone(), grace };
        let life = self.life.clone();
        let span = span(&life, desired, &turn.memory.id);
        let (outcome, updated) = match &self.life {
            Lifecycle::Syncing => span.run(running.run_with_updates(life, turn.sync(stopping))).await,
            Lifecycle::Terminating { .. } => {
                span.run(running.run_with_updates(life, turn.stop(grace_seen, order))).await
            }
            Lifecycle::Terminated { .. } => {
                let removable = self.life.content_removable();
                span.run(running.run_with_updates(life, turn.clean_up(removable))).await
            }
            Lifecycle::Finished { .. } => return (SyncResult::Settled, false),
        };
        if let Err(text) = &outcome {
            span.run(async { self.record_failure(text) }).await;
        }
        drop(span);
        match outcome {
            Ok(pod_sync::Outcome::Moved(done)) => {
                let next = self.life.clone().after(done, desired.pod.as_deref());
                self.enter(next).await;
                (SyncResult::SyncAgain, updated)
            }
            Ok(pod_sync::Outcome::Unchanged(end)) => (end, updated),
            Err(_) => (SyncResult::Failed, updated),
        }
    }

    fn record_failure(&self, text: &str) {
        self.memory.progress.fail(text);
        error!(pod = %self.memory.id.object_name(), podUID = %self.memory.id.uid, err = %text, "Error syncing pod, skipping");
        berth_otel::record_exception(text);
    }

    fn grace(&self) -> Option<Grace> {
        match &self.life {
            Lifecycle::Terminating { grace, .. } => Some(Grace::from_secs(*grace)),
            _ => None,
        }
    }
}

/// Span of one sync: a root span, since nobody waits for it (spec 08 §13).
fn span(life: &Lifecycle, desired: &PodUpdate, id: &PodRef) -> Span {
    let name = match life {
        Lifecycle::Syncing => "syncPod",
        Lifecycle::Terminating { .. } => "syncTerminatingPod",
        Lifecycle::Terminated { .. } | Lifecycle::Finished { .. } => "syncTerminatedPod",
    };
    berth_otel::root_span(Scope::Kubelet, name, || {
        let mut attributes = vec![
            KeyValue::new("k8s.pod.uid", id.uid.to_string()),
            KeyValue::new("k8s.pod", id.object_name().to_string()),
            KeyValue::new("k8s.pod.name", id.name.to_string()),
            KeyValue::new("k8s.namespace.name", id.namespace.to_string()),
        ];
        if *life == Lifecycle::Syncing {
            attributes.push(KeyValue::new("k8s.pod.update_type", desired.cause.label()));
        }
        attributes
    })
}

/// Waits until the pod's observation changed, but at least `least`.
async fn moved(view: &mut PodView, least: Duration) {
    if !least.is_zero() {
        tokio::time::sleep(least).await;
    }
    view.changed().await;
}

/// Receives mailbox updates while a sync runs.
struct UpdateListener<'a> {
    mailbox: &'a mut watch::Receiver<PodUpdate>,
    stopping: CancellationToken,
    grace: watch::Sender<Option<Grace>>,
}

impl UpdateListener<'_> {
    /// Runs the sync to completion. A stop request that arrives in the meantime cancels a sync's
    /// pending starts; a shorter grace period is passed to the kill in progress.
    async fn run_with_updates<T>(self, mut life: Lifecycle, turn: impl Future<Output = T>) -> (T, bool) {
        tokio::pin!(turn);
        let mut updated = false;
        loop {
            tokio::select! {
                biased;
                out = &mut turn => return (out, updated),
                changed = self.mailbox.changed() => {
                    if changed.is_err() {
                        return (turn.await, updated);
                    }
                    updated = true;
                    let word = self.mailbox.borrow_and_update().clone();
                    life = life.apply(&word.state, word.pod.as_deref());
                    if let Lifecycle::Terminating { grace, .. } = &life {
                        self.stopping.cancel();
                        self.grace.send_if_modified(|current| {
                            let shorter = Some(Grace::from_secs(*grace));
                            std::mem::replace(current, shorter) != shorter
                        });
                    }
                }
            }
        }
    }
}

/// Creates the channel of reports, sized so that workers rarely wait for the sync loop.
pub fn reports() -> (mpsc::Sender<Report>, mpsc::Receiver<Report>) {
    mpsc::channel(256)
}
