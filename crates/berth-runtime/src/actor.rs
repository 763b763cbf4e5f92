//! Actor per sandbox: one task owns its state machine, persists records, and publishes events.
//!
//! ```text
//!  RPCs ──turn──►┐                      ┌─► records on disk
//!                ├─► sandbox (a value) ─┼─► container events
//!  shim ──exit──►┘                      └─► snapshot for readers
//! ```
//!
//! A turn is a function over the sandbox value. Its changes are persisted, published as a snapshot, and sent as events,
//! in this order, before the next turn. The caller does long work itself and waits for snapshots; the actor never waits
//! for a caller. Implements spec 09 §7, §9.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{mpsc, oneshot, watch},
    task::spawn_blocking,
    time::{Instant, sleep_until, timeout},
};
use tracing::{error, info, warn};

use super::{
    config::OomRule,
    container::Container,
    errors::{ErrorKind, RuntimeError, RuntimeResult},
    ports::{Groups, Shim, ShimSession},
    reconciliation,
    runtime::now_ns,
    runtime_context::RuntimeContext,
    sandbox::Sandbox,
    store,
};
use berth_shim::plan::{Exit, ExitEvent, ProcessTarget, ShimRequest};
use berth_sys::{backoff::Backoff, failpoint};

/// Capacity of the actor's mailbox, messages.
const MAILBOX: usize = 64;
/// Deadline of a shim request that needs no work.
pub const SHIM_ANSWER: Duration = Duration::from_secs(10);
/// Timeout of a record write; the sandbox continues without the write afterwards.
const WRITE_LIMIT: Duration = Duration::from_secs(5);
/// How long a shim may take to accept a new connection after the old one was lost.
const FIND_LIMIT: Duration = Duration::from_millis(500);
/// Back-off between attempts to write records that could not be written.
const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));

type Turn = Box<dyn FnOnce(&mut Sandbox) + Send>;

enum Message {
    Turn(Turn, oneshot::Sender<RuntimeResult<()>>),
    Shim(ShimSession),
}

/// Senders that deliver the exit of an executed process, by target.
type Waiters = Arc<Mutex<HashMap<ProcessTarget, oneshot::Sender<Exit>>>>;

/// Handle of a sandbox actor. Clones address the same sandbox.
#[derive(Clone)]
pub struct SandboxHandle {
    mailbox: mpsc::Sender<Message>,
    view: watch::Receiver<Arc<Sandbox>>,
    shim: Arc<Mutex<Option<Arc<dyn Shim>>>>,
    waiters: Waiters,
    /// Serializes operations that stop, remove, or change the sandbox.
    pub lane: Arc<tokio::sync::Mutex<()>>,
}

impl SandboxHandle {
    /// Spawns the task that owns the sandbox.
    pub fn start(sandbox: Sandbox, shell: Arc<RuntimeContext>) -> Self {
        let (mailbox, mail) = mpsc::channel(MAILBOX);
        let sandbox = Arc::new(sandbox);
        let (snapshots, view) = watch::channel(sandbox.clone());
        let (shim, waiters) = (Arc::default(), Waiters::default());
        let pod = Self { mailbox, view, shim, waiters, lane: Arc::default() };
        let actor = Actor {
            sandbox,
            snapshots,
            shim: pod.shim.clone(),
            waiters: pod.waiters.clone(),
            shell: shell.clone(),
            unsaved: None,
        };
        shell.spawn(actor.run(mail));
        pod
    }

    /// The latest published snapshot of the sandbox.
    pub fn now(&self) -> Arc<Sandbox> {
        self.view.borrow().clone()
    }

    /// Runs a turn; returns once its changes are persisted, published, and sent as events.
    ///
    /// # Errors
    /// The sandbox is gone, or its records cannot be written (the change in memory remains in force).
    pub async fn turn<R: Send + 'static>(
        &self,
        turn: impl FnOnce(&mut Sandbox) -> R + Send + 'static,
    ) -> RuntimeResult<R> {
        let (result, saved) = self.take_turn(turn).await?;
        saved.map(|()| result)
    }

    /// Like [`SandboxHandle::turn`], for stop and remove, which must work on a full disk, and for processes that have
    /// started or ended: a record that does not fit is written when there is space again. After an earlier restart the
    /// older record is loaded; the same call completes again, and the shim reports its processes.
    ///
    /// # Errors
    /// The sandbox is gone, or its records cannot be written for a reason other than a full disk.
    pub async fn turn_on_full_disk<R: Send + 'static>(
        &self,
        turn: impl FnOnce(&mut Sandbox) -> R + Send + 'static,
    ) -> RuntimeResult<R> {
        match self.take_turn(turn).await? {
            (result, Err(error)) if error.kind == ErrorKind::Exhausted => Ok(result),
            (result, saved) => saved.map(|()| result),
        }
    }

    /// The result of a turn, and whether its records were persisted.
    async fn take_turn<R: Send + 'static>(
        &self,
        turn: impl FnOnce(&mut Sandbox) -> R + Send + 'static,
    ) -> RuntimeResult<(R, RuntimeResult<()>)> {
        let (sender, result) = oneshot::channel();
        let (done, saved) = oneshot::channel();
        let turn: Turn = Box::new(move |sandbox| {
            // The caller may have dropped the future.
            let _ = sender.send(turn(sandbox));
        });
        let gone = || RuntimeError::no_sandbox(self.now().id());
        self.mailbox.send(Message::Turn(turn, done)).await.map_err(|_| gone())?;
        let saved = saved.await.map_err(|_| gone())?;
        let result = result.await.map_err(|_| gone())?;
        Ok((result, saved))
    }

    /// Waits until the predicate is true of the sandbox.
    ///
    /// # Errors
    /// The sandbox is gone.
    pub async fn wait_for(&self, mut is_so: impl FnMut(&Sandbox) -> bool) -> RuntimeResult<Arc<Sandbox>> {
        let mut view = self.view.clone();
        let found = view.wait_for(|sandbox| is_so(sandbox)).await.map(|sandbox| sandbox.clone());
        found.map_err(|_| RuntimeError::no_sandbox(self.now().id()))
    }

    /// Attaches a shim connection; the actor reads the shim's events from now on.
    ///
    /// # Errors
    /// The sandbox is gone.
    pub async fn connect(&self, connected: ShimSession) -> RuntimeResult<()> {
        *self.shim.lock().unwrap_or_else(PoisonError::into_inner) = Some(connected.shim.clone());
        let sent = self.mailbox.send(Message::Shim(connected)).await;
        sent.map_err(|_| RuntimeError::no_sandbox(self.now().id()))
    }

    /// The connected shim.
    ///
    /// # Errors
    /// No shim is connected.
    pub fn shim(&self) -> RuntimeResult<Arc<dyn Shim>> {
        let shim = self.shim.lock().unwrap_or_else(PoisonError::into_inner).clone();
        shim.ok_or_else(|| RuntimeError::not_ready(self.now().id()))
    }

    /// Detaches the shim before its shutdown, so that the end of the connection does not count as a lost shim.
    pub fn detach_shim(&self) -> Option<Arc<dyn Shim>> {
        self.shim.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Registers for the exit of an executed process; must be called before the process starts.
    pub fn await_exit(&self, of: ProcessTarget) -> oneshot::Receiver<Exit> {
        let (sender, exit) = oneshot::channel();
        let mut all = self.waiters.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, waiter| !waiter.is_closed());
        all.insert(of, sender);
        exit
    }

    /// Number of executed processes in a container whose exit a caller awaits.
    pub fn executing(&self, container: &str) -> usize {
        let all = self.waiters.lock().unwrap_or_else(PoisonError::into_inner);
        let of = |target: &ProcessTarget| matches!(target, ProcessTarget::Exec(of, _) if of == container);
        all.iter().filter(|(target, waiter)| of(target) && !waiter.is_closed()).count()
    }
}

struct Actor {
    sandbox: Arc<Sandbox>,
    snapshots: watch::Sender<Arc<Sandbox>>,
    shim: Arc<Mutex<Option<Arc<dyn Shim>>>>,
    waiters: Waiters,
    shell: Arc<RuntimeContext>,
    /// When records that could not be written are retried, and the current back-off.
    unsaved: Option<(Instant, Backoff)>,
}

impl Actor {
    async fn run(mut self, mut mail: mpsc::Receiver<Message>) {
        let mut events: Option<mpsc::Receiver<ExitEvent>> = None;
        let stop = self.shell.stop.clone();
        while !self.sandbox.is_removed {
            tokio::select! {
                biased;
                // Pods keep running when the agent stops.
                () = stop.cancelled() => break,
                event = next(&mut events) => match event {
                    Some(event) => self.handle_event(event).await,
                    None => events = self.lost_shim().await,
                },
                message = mail.recv() => match message {
                    Some(Message::Turn(turn, done)) => {
                        let saved = self.turn(turn).await;
                        // The caller may have dropped the future.
                        let _ = done.send(saved);
                    }
                    Some(Message::Shim(connected)) => events = Some(connected.events),
                    None => break,
                },
                () = retry_at(self.unsaved) => {
                    let (old, new) = (None, self.sandbox.clone());
                    let saved = self.save(old, new).await;
                    self.note(&saved);
                }
            }
        }
    }

    /// Runs a turn, persists the changes, publishes the snapshot, and sends events.
    async fn turn(&mut self, turn: impl FnOnce(&mut Sandbox)) -> RuntimeResult<()> {
        let old = self.sandbox.clone();
        turn(Arc::make_mut(&mut self.sandbox));
        let new = self.sandbox.clone();
        let saved = self.save(Some(old.clone()), new.clone()).await;
        self.note(&saved);
        self.snapshots.send_replace(new.clone());
        self.shell.hub.publish(&old, &new, now_ns());
        saved
    }

    fn note(&mut self, saved: &RuntimeResult<()>) {
        let Err(cause) = saved else {
            self.unsaved = None;
            return;
        };
        let mut backoff = self.unsaved.map_or(RETRY, |(_, backoff)| backoff);
        warn!(podSandboxID = self.sandbox.id(), err = %cause, "Failed to write sandbox record, retrying after back-off");
        self.unsaved = Some((Instant::now() + backoff.next_delay(), backoff));
    }

    async fn save(&self, old: Option<Arc<Sandbox>>, new: Arc<Sandbox>) -> RuntimeResult<()> {
        // After a failed write the record on disk is unknown: write all of it.
        let old = old.filter(|_| self.unsaved.is_none());
        let shell = self.shell.clone();
        let writing = spawn_blocking(move || save(&shell, old.as_deref(), &new));
        match timeout(WRITE_LIMIT, writing).await {
            Ok(done) => done.map_err(|e| RuntimeError::other(e.to_string()))?,
            Err(_) => Err(RuntimeError::deadline(format!("timed out writing to {}", self.shell.layout.root.display()))),
        }
    }

    async fn handle_event(&mut self, event: ExitEvent) {
        let ExitEvent { number, of, exit } = event;
        match &of {
            ProcessTarget::Container(id) => self.container_exited(id.clone(), exit).await,
            ProcessTarget::Exec(..) => {
                let waiter = self.waiters.lock().unwrap_or_else(PoisonError::into_inner).remove(&of);
                // The receiver may be gone.
                let _ = waiter.map(|waiter| waiter.send(exit));
            }
            // Without process 1 no other process runs in its PID namespace.
            ProcessTarget::Init => {
                // `note` logs a failed write and schedules the retry.
                let _ = self.turn(|sandbox| sandbox.phase = store::objects::SandboxPhase::NotReady).await;
            }
        }
        let shim = self.shim.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(shim) = shim {
            self.shell.spawn(async move {
                // A shim that misses the acknowledgement sends the event again.
                let _ = shim.request(ShimRequest::Acknowledge(number), Vec::new(), SHIM_ANSWER).await;
            });
        }
    }

    async fn container_exited(&mut self, id: String, exit: Exit) {
        failpoint::reached("exit.received");
        let (rule, ended) = (self.shell.config.oom_reason, id.clone());
        // `note` logs a failed write and schedules the retry.
        let _ = self
            .turn(move |sandbox| {
                if let Ok(container) = sandbox.container_mut(&ended) {
                    container.mark_exited(&exit, rule);
                }
            })
            .await;
        let sandbox = self.sandbox.clone();
        let Ok(container) = sandbox.container(&id) else { return };
        let (shell, group, record) =
            (self.shell.clone(), container.meta.group.clone(), self.shell.exit_record(&sandbox, &id));
        let tidied = spawn_blocking(move || tidy(&*shell.groups, &group, &record));
        self.shell.spawn(async move {
            let _ = tidied.await;
        });
    }

    /// Handles the end of the shim connection: reconnects if the shim still answers; otherwise its containers are lost.
    async fn lost_shim(&mut self) -> Option<mpsc::Receiver<ExitEvent>> {
        let was_connected = self.shim.lock().unwrap_or_else(PoisonError::into_inner).take().is_some();
        if !was_connected || !self.sandbox.is_ready() || self.shell.stop.is_cancelled() {
            return None;
        }
        if let Ok(Ok((connected, hello))) = timeout(FIND_LIMIT, self.shell.shims.find(self.sandbox.id())).await {
            warn!(podSandboxID = self.sandbox.id(), "Reconnected to the shim of the sandbox");
            *self.shim.lock().unwrap_or_else(PoisonError::into_inner) = Some(connected.shim.clone());
            let rule = self.shell.config.oom_reason;
            // `note` logs a failed write and schedules the retry.
            let _ = self.turn(move |sandbox| drop(reconciliation::with_shim(sandbox, &hello, rule, now_ns()))).await;
            return Some(connected.events);
        }
        error!(podSandboxID = self.sandbox.id(), "Shim of the sandbox exited unexpectedly, killing its containers");
        self.shell.metrics.shims_lost.inc();
        kill_all(&self.shell, &self.sandbox).await;
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let (shell, rule) = (self.shell.clone(), self.shell.config.oom_reason);
        // `note` logs a failed write and schedules the retry.
        let _ = self.turn(move |sandbox| mark_containers_lost(&shell, sandbox, rule, now_ns())).await;
        None
    }
}

/// Kills and removes the cgroups of a sandbox and of its containers that have not exited.
pub async fn kill_all(shell: &Arc<RuntimeContext>, sandbox: &Sandbox) {
    let running = |c: &&Container| c.finished().is_none();
    let groups = sandbox.containers.values().filter(running).map(|c| c.meta.group.clone());
    // The pod's process 1 runs in the sandbox's own cgroup.
    let groups: Vec<_> = groups.chain([sandbox.meta.group.clone()]).collect();
    let blocking = shell.clone();
    let killing = spawn_blocking(move || {
        for group in groups {
            if let Err(cause) = blocking.groups.remove(&group) {
                warn!(cgroup = group, err = %cause, "Failed to kill remaining processes of the container");
            }
        }
    });
    if timeout(Duration::from_secs(30), killing).await.is_err() {
        warn!(podSandboxID = sandbox.id(), "Timed out waiting for remaining processes of the sandbox to be killed");
    }
}

/// Marks a sandbox without shim not ready and its containers exited, with the exit the shim recorded, or as lost.
pub fn mark_containers_lost(shell: &RuntimeContext, sandbox: &mut Sandbox, rule: OomRule, at_ns: i64) {
    sandbox.phase = store::objects::SandboxPhase::NotReady;
    let folder = shell.layout.shim(sandbox.id());
    for container in sandbox.containers.values_mut().filter(|c| c.running().is_ok()) {
        if let Some(exit) = shell.shims.exit_record(&folder, container.id()) {
            container.mark_exited(&exit, rule);
        }
    }
    for container in sandbox.containers.values_mut() {
        if container.mark_lost(at_ns) {
            info!(containerID = container.id(), "Container lost with its shim");
        }
    }
}

/// After a container exit: removes its cgroup with the remaining processes, and the shim's exit record.
fn tidy(groups: &dyn Groups, group: &str, record: &std::path::Path) {
    failpoint::reached("exit.written");
    if let Err(cause) = groups.remove(group) {
        warn!(cgroup = group, err = %cause, "Failed to remove cgroup of the exited container");
    }
    failpoint::reached("exit.group");
    match std::fs::remove_file(record) {
        Err(cause) if cause.kind() != std::io::ErrorKind::NotFound => {
            warn!(path = %record.display(), err = %cause, "Failed to delete exit record");
        }
        _ => {}
    }
}

/// Persists the records that differ. Container create and remove write and delete theirs themselves.
fn save(shell: &RuntimeContext, old: Option<&Sandbox>, new: &Sandbox) -> RuntimeResult<()> {
    if new.is_removed {
        return Ok(());
    }
    let record = new.record();
    if old.is_none_or(|old| old.record() != record) {
        store::save(&shell.layout.sandbox(new.id()).join("state.json"), &record)?;
    }
    for (id, container) in &new.containers {
        let record = container.record();
        let before = old.and_then(|old| old.containers.get(id)).map(Container::record);
        if before.as_ref() != Some(&record) && !container.is_removing {
            store::save(&shell.layout.container(id).join("state.json"), &record)?;
        }
    }
    Ok(())
}

async fn next(events: &mut Option<mpsc::Receiver<ExitEvent>>) -> Option<ExitEvent> {
    match events {
        Some(events) => events.recv().await,
        None => std::future::pending().await,
    }
}

async fn retry_at(unsaved: Option<(Instant, Backoff)>) {
    match unsaved {
        Some((at, _)) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}
