//! A pod's worker: an actor with a mailbox of the latest desired state.
//!
//! ```text
//!  sync loop ──desired (latest wins)──► worker ──one turn──► runtime, volumes, status
//!  pod store ──moved──────────────────►   │
//!  runtime state, timer ──────────────►   └──report──► sync loop
//! ```
//!
//! Each turn takes desired state and a look that began after the last action, asks the pure
//! [`Lifecycle`] what is due, does that one thing, and says when it wants to be woken. A turn is
//! never left hanging on a wish that came meanwhile: what is overheard shortens a grace period or
//! cancels a start at once. Behaviour: spec 02a §9.

mod context;
mod ends;
mod ground;
mod resize;
mod stop;
mod sync;

use std::{sync::Arc, time::Duration};

use rand::Rng;
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error};

pub use context::{EngineConfig, WorkerContext};

use super::{
    lifecycle::{Lifecycle, Wish},
    work_queue::{self, TurnEnd},
};
use berth_ports::{Grace, PodView, Stage};
use berth_types::{Pod, PodRef};

/// What caused the latest message of the sync loop: the `operation_type` label.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cause {
    /// The pod is new.
    Create,
    /// Its definition changed.
    Update,
    /// Something about it should be looked at again.
    Sync,
    /// It is to stop.
    Kill,
}

impl Cause {
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
pub struct Desired {
    /// The definition, with allocated resources; `None` for a pod that only the runtime knows.
    pub pod: Option<Arc<Pod>>,
    /// What is wanted of it.
    pub wish: Wish,
    /// Why this was sent.
    pub cause: Cause,
    /// When this was handed to the worker.
    pub handed_at: Instant,
}

/// What workers tell the sync loop.
#[derive(Clone, Debug)]
pub struct Report {
    /// Which pod.
    pub id: PodRef,
    /// Its state now.
    pub life: Lifecycle,
}

/// How the sync loop holds a worker.
#[derive(Debug)]
pub struct WorkerHandle {
    /// The mailbox.
    pub desired: watch::Sender<Desired>,
    /// Where the pod is in its life, as the worker last said.
    pub life: watch::Receiver<Lifecycle>,
    /// What it is waiting for.
    pub stage: Stage,
}

/// Starts a worker; it runs until the pod is finished or the agent shuts down.
pub fn spawn(context: Arc<WorkerContext>, id: PodRef, first: Lifecycle, desired: Desired) -> WorkerHandle {
    let count = |pod: &Pod| pod.containers().len() + pod.init_containers().len();
    let stage = Stage::of_containers(desired.pod.as_deref().map_or(0, count));
    let (desired, mailbox) = watch::channel(desired);
    let (life_sender, life) = watch::channel(first.clone());
    let view = context.observer.view(&id);
    let mut worker = Worker {
        memory: sync::Memory::new(id, stage.clone(), view),
        mailbox,
        life: first,
        life_sender,
        context: context.clone(),
    };
    context.tasks.spawn(async move { worker.run().await });
    WorkerHandle { desired, life, stage }
}

struct Worker {
    context: Arc<WorkerContext>,
    mailbox: watch::Receiver<Desired>,
    life: Lifecycle,
    life_sender: watch::Sender<Lifecycle>,
    memory: sync::Memory,
}

impl Worker {
    async fn run(&mut self) {
        let context = self.context.clone();
        let mut runtime_state = context.runtime_state.clone();
        let mut fresh_word = true;
        // Who is finished says so once and then nothing: its UID may have begun a second life.
        while !self.life.is_finished() {
            let desired = {
                let word = self.mailbox.borrow_and_update();
                fresh_word |= word.has_changed(); // it may have come between two turns
                word.clone()
            };
            self.heed(&desired).await;
            let _ = runtime_state.borrow_and_update();
            let begun = fresh_word.then_some((desired.handed_at, desired.cause));
            let (end, overheard) = tokio::select! {
                biased;
                () = context.shutdown.cancelled() => return,
                // In a place of its own: a worker rests nearly always, and a turn is most of what it needs.
                end = Box::pin(self.turn(&desired, fresh_word)) => end,
            };
            drop(desired); // a word would be kept while the worker rests
            if let Some((handed_at, cause)) = begun {
                context.metrics.worker_duration(cause.label(), handed_at.elapsed());
            }
            if overheard || end == TurnEnd::Again {
                fresh_word = overheard;
                continue;
            }
            let mut wait = work_queue::delay(&end, context.config.sync_frequency, rand::rng().random());
            if self.life == Lifecycle::Syncing
                && let Some(left) = sync::Turn::until_deadline(&context, &self.memory)
            {
                wait = wait.min(left);
            }
            self.rest(&end, wait);
            fresh_word = false;
            tokio::select! {
                biased;
                () = context.shutdown.cancelled() => return,
                changed = self.mailbox.changed() => match changed {
                    Ok(()) => fresh_word = true,
                    Err(_) => return, // the sync loop is gone
                },
                () = moved(&mut self.memory.view, work_queue::observation_delay(&end)) => {}
                Ok(()) = runtime_state.changed(), if self.memory.blocked_on_runtime => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
        self.memory.stage.rest("finished", None);
    }

    /// Says what the next turn waits for.
    fn rest(&self, end: &TurnEnd, wait: Duration) {
        let name = end.waits_for(self.memory.blocked_on_runtime);
        self.memory.stage.rest(name, (*end != TurnEnd::Settled).then(|| Instant::now() + wait));
    }

    /// Takes notice of the latest word; tells the sync loop where the pod's life moved on.
    async fn heed(&mut self, desired: &Desired) {
        let next = self.life.clone().heed(&desired.wish, desired.pod.as_deref());
        self.enter(next).await;
    }

    async fn enter(&mut self, next: Lifecycle) {
        if next == self.life {
            return;
        }
        debug!(pod = %self.memory.id.object_name(), podUID = %self.memory.id.uid, from = self.life.label(), to = next.label(), "Pod worker moves on");
        self.life = next.clone();
        self.life_sender.send_replace(next.clone());
        let report = Report { id: self.memory.id.clone(), life: next };
        if self.context.reports.send(report).await.is_err() {
            debug!(pod = %self.memory.id.object_name(), "The sync loop is gone");
        }
    }

    /// One turn; also says whether a newer word came meanwhile.
    async fn turn(&mut self, desired: &Desired, fresh_word: bool) -> (TurnEnd, bool) {
        let stopping = CancellationToken::new();
        let (grace, grace_seen) = watch::channel(self.grace());
        let turn =
            sync::Turn { context: &self.context, memory: &mut self.memory, pod: desired.pod.clone(), fresh_word };
        let order = desired.wish.stop.as_ref().and_then(|stop| stop.status.clone());
        let running = Running { mailbox: &mut self.mailbox, stopping: stopping.clone(), grace };
        let (outcome, overheard) = match &self.life {
            Lifecycle::Syncing => running.overhearing(self.life.clone(), turn.sync(stopping)).await,
            Lifecycle::Terminating { .. } => running.overhearing(self.life.clone(), turn.stop(grace_seen, order)).await,
            Lifecycle::Terminated { .. } => {
                running.overhearing(self.life.clone(), turn.clean_up(self.life.content_removable())).await
            }
            Lifecycle::Finished { .. } => return (TurnEnd::Settled, false),
        };
        match outcome {
            Ok(sync::Outcome::Moved(done)) => {
                let next = self.life.clone().after(done, desired.pod.as_deref());
                self.enter(next).await;
                (TurnEnd::Again, overheard)
            }
            Ok(sync::Outcome::Stays(end)) => (end, overheard),
            Err(text) => {
                self.memory.stage.failed(&text);
                error!(pod = %self.memory.id.object_name(), podUID = %self.memory.id.uid, err = %text, "Error syncing pod, skipping");
                (TurnEnd::Failed, overheard)
            }
        }
    }

    fn grace(&self) -> Option<Grace> {
        match &self.life {
            Lifecycle::Terminating { grace, .. } => Some(Grace::from_secs(*grace)),
            _ => None,
        }
    }
}

/// Waits until the pod's observation changed, and at least that long.
async fn moved(view: &mut PodView, least: Duration) {
    if !least.is_zero() {
        tokio::time::sleep(least).await;
    }
    view.moved().await;
}

/// Listens to the mailbox while a turn runs.
struct Running<'a> {
    mailbox: &'a mut watch::Receiver<Desired>,
    stopping: CancellationToken,
    grace: watch::Sender<Option<Grace>>,
}

impl Running<'_> {
    /// Runs the turn to its end. An order to stop that comes meanwhile cancels a sync turn's
    /// starts; a shorter grace period reaches the kill that is under way.
    async fn overhearing<T>(self, mut life: Lifecycle, turn: impl Future<Output = T>) -> (T, bool) {
        tokio::pin!(turn);
        let mut overheard = false;
        loop {
            tokio::select! {
                biased;
                out = &mut turn => return (out, overheard),
                changed = self.mailbox.changed() => {
                    if changed.is_err() {
                        return (turn.await, overheard);
                    }
                    overheard = true;
                    let word = self.mailbox.borrow_and_update().clone();
                    life = life.heed(&word.wish, word.pod.as_deref());
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

/// The channel of reports, sized so that workers hardly ever wait for the sync loop.
pub fn reports() -> (mpsc::Sender<Report>, mpsc::Receiver<Report>) {
    mpsc::channel(256)
}
