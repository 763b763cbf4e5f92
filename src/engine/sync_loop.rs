//! The sync loop: one task that owns what is desired, who works on it, and who may start.
//!
//! ```text
//!  mux ──changes──►  ┌───────────┐ ──desired──► worker (one per pod)
//!  workers ─reports─►│ sync loop │
//!  others ─commands─►└───────────┘ ──snapshot─► server, status
//!  2 s tick ─────────────▲
//! ```
//!
//! It decides and dispatches, and never waits: whatever can block for one pod is done by that
//! pod's worker or in a task of its own. Behaviour: spec 02a §3, §4, §9, §11, with the
//! improvements of §14 (readiness per source, restarts at once, a runtime outage stops nothing
//! but runtime calls).

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, MissedTickBehavior},
};
use tracing::{debug, error, info, warn};

use super::{
    admission::{Admitted, Refusal, preemption},
    allocation::{Allocator, Candidate, Preempt, Presence, Retry, Trigger},
    fates::{Fates, FatesView},
    grace::kill_wait,
    heartbeat::Heartbeat,
    lifecycle::{self, Lifecycle, StatusOverride, StopCause, StopOrder, Wish},
    pod_manager::PodManager,
    ports::{Event, StageView},
    ready::SourcesReady,
    static_order::StaticOrder,
    worker::{self, Cause, Desired, Report, WorkerContext, WorkerHandle},
};
use crate::pod::{Operation, Pod, PodChange, PodFullName, PodRef, PodUid, api, observed::ObservedPod, qos::Qos};

/// What others ask of the sync loop.
#[derive(Debug)]
pub enum Command {
    /// Take another turn of that pod (a probe said something new).
    Poke(PodUid),
    /// Kill a pod: eviction, preemption, shutdown. The answer is its life, to be watched.
    Kill {
        /// Which.
        uid: PodUid,
        /// Overrides the grace period, whole seconds.
        grace: Option<i64>,
        /// What the status shall say.
        status: Option<StatusOverride>,
        /// `None` where no such pod is worked on.
        reply: oneshot::Sender<Option<watch::Receiver<Lifecycle>>>,
    },
    /// A critical pod for which others have been preempted.
    Preempted(Arc<Pod>),
    /// What every worker is doing.
    Describe(oneshot::Sender<Vec<WorkerView>>),
    /// What a sweep found on disk and in the cgroup tree.
    Swept(Found),
    /// Removal of these is done.
    SweepDone(Vec<PodUid>),
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

/// How others reach the sync loop.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    /// Commands.
    pub commands: mpsc::Sender<Command>,
    /// All desired pods (mirrors excluded), in order of namespace, name and UID.
    pub pods: watch::Receiver<Arc<Vec<Arc<Pod>>>>,
    /// What becomes of each pod.
    pub fates: FatesView,
    /// When the loop last turned.
    pub heartbeat: Heartbeat,
}

/// What the sync loop is fed with.
pub struct Inputs {
    /// The mux.
    pub changes: mpsc::Receiver<PodChange>,
    /// The workers.
    pub reports: mpsc::Receiver<Report>,
    /// Which sources are registered.
    pub ready: SourcesReady,
    /// Admission and allocation.
    pub allocator: Allocator,
}

enum State {
    /// Stands in line behind another pod of its full name, or behind a removal.
    Waiting,
    /// Has a worker.
    Working(WorkerHandle),
    /// Its worker is done.
    Finished,
}

struct Record {
    id: PodRef,
    pod: Option<Arc<Pod>>,
    wish: Wish,
    life: Lifecycle,
    state: State,
    restart_requested: bool,
    /// Whether leftovers of its full name have been looked for.
    leftovers_seen: bool,
}

impl Record {
    /// Whether it is on its way out: its worker says so, or was told to stop and has not said yet.
    fn is_stopping(&self) -> bool {
        self.life.is_stopping() || self.wish.stop.is_some()
    }
}

/// The task's state; see the module's documentation.
pub struct SyncLoop {
    context: Arc<WorkerContext>,
    commands: mpsc::Sender<Command>,
    pods: PodManager,
    records: HashMap<PodUid, Record>,
    order: StaticOrder,
    ready: SourcesReady,
    allocator: Allocator,
    retry_at: Instant,
    preempting: HashSet<PodUid>,
    rejected: HashSet<PodUid>,
    sweeping: HashSet<PodUid>,
    sweep_due: bool,
    published: watch::Sender<Arc<Vec<Arc<Pod>>>>,
    fates: watch::Sender<Arc<Fates>>,
    changed: bool,
    heartbeat: Heartbeat,
}

/// How often leftovers on disk are looked for although nothing was removed.
const SWEEP_PERIOD: Duration = Duration::from_secs(60);

/// How long the first list of the runtime is waited for before pods are taken in without it.
const FIRST_LIST: Duration = Duration::from_secs(5);

/// Starts the sync loop.
pub fn start(context: Arc<WorkerContext>, mut inputs: Inputs) -> EngineHandle {
    let (commands, received) = mpsc::channel(256);
    let (published, pods) = watch::channel(Arc::new(Vec::new()));
    let (fates, fates_seen) = watch::channel(Arc::default());
    let heartbeat = Heartbeat::new();
    if let Some(writer) = inputs.allocator.take_writer() {
        context.tasks.spawn(writer.run(context.shutdown.clone()));
    }
    let sync_loop = SyncLoop {
        context: context.clone(),
        commands: commands.clone(),
        pods: PodManager::default(),
        records: HashMap::new(),
        order: StaticOrder::default(),
        ready: inputs.ready,
        allocator: inputs.allocator,
        retry_at: Instant::now(),
        preempting: HashSet::new(),
        rejected: HashSet::new(),
        sweeping: HashSet::new(),
        sweep_due: true,
        published,
        fates,
        changed: true,
        heartbeat: heartbeat.clone(),
    };
    context.tasks.spawn(sync_loop.run(inputs.changes, inputs.reports, received));
    EngineHandle { commands, pods, fates: FatesView(fates_seen), heartbeat }
}

impl SyncLoop {
    async fn run(
        mut self,
        mut changes: mpsc::Receiver<PodChange>,
        mut reports: mpsc::Receiver<Report>,
        mut commands: mpsc::Receiver<Command>,
    ) {
        info!("Starting kubelet main sync loop");
        let mut tick = tokio::time::interval(self.context.config.housekeeping_period);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let shutdown = self.context.shutdown.clone();
        let mut sources_open = true;
        // Admission and restarts depend on what runs already; a runtime that is down is not waited for.
        let observer = self.context.observer.clone();
        let first_list = tokio::time::timeout(FIRST_LIST, observer.list());
        tokio::pin!(first_list);
        let mut listed = false;
        loop {
            self.heartbeat.beat();
            tokio::select! {
                biased;
                () = shutdown.cancelled() => break,
                Some(report) = reports.recv() => self.on_report(report),
                _ = &mut first_list, if !listed => listed = true,
                change = changes.recv(), if listed && sources_open => match change {
                    Some(change) => self.on_change(change).await,
                    None => sources_open = false,
                },
                Some(command) = commands.recv() => self.on_command(command).await,
                _ = tick.tick() => self.housekeeping().await,
            }
            self.publish();
        }
    }

    /// One operation of the mux.
    async fn on_change(&mut self, change: PodChange) {
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
            Operation::Reconcile => {
                for pod in change.pods {
                    self.on_reconcile(pod).await;
                }
            }
        }
        if self.ready.heard_from(change.source) {
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
                self.poke_pod_of(&pod);
            } else {
                self.add(pod).await;
            }
        }
        self.retry_resizes(Trigger::PodsAdded).await;
    }

    /// Admits a pod that is new to this node and hands it to a worker.
    async fn add(&mut self, pod: Arc<Pod>) {
        let stopping = self.records.get(pod.uid()).is_some_and(Record::is_stopping);
        if stopping || pod.is_api_terminal() {
            self.hand_over(&pod, Cause::Create);
            return;
        }
        let active = self.active_pods();
        let node = self.context.node.borrow().clone();
        let presence = if self.runs_already(&pod) { Presence::Running } else { Presence::Absent };
        match self.allocator.admit(Candidate { pod: &pod, presence, active: &active, node: &node }) {
            Ok(admitted) if admitted.victims.is_empty() => {
                self.rejected.remove(pod.uid());
                self.allocator.added(&pod);
                self.hand_over(&pod, Cause::Create);
            }
            Ok(admitted) => {
                self.preempting.insert(pod.uid().clone());
                self.preempt(Some(pod), admitted);
            }
            Err(refusal) => self.reject(&pod, &refusal),
        }
    }

    fn reject(&mut self, pod: &Arc<Pod>, refusal: &Refusal) {
        warn!(pod = %pod.object_name(), podUID = %pod.uid(), reason = %refusal.reason, err = %refusal.message, "Pod was rejected");
        self.allocator.reject(pod, refusal);
        let status = api::PodStatus {
            phase: Some("Failed".to_owned()),
            qos_class: Some(Qos::of(pod).as_str().to_owned()),
            reason: Some(refusal.reason.to_string()),
            message: Some(refusal.status_message()),
            ..Default::default()
        };
        self.context.status.set(pod, status, self.context.clock.now());
        self.rejected.insert(pod.uid().clone());
    }

    /// Tries resizes that wait, and passes on what came of it.
    async fn retry_resizes(&mut self, trigger: Trigger) {
        if !self.allocator.has_pending() {
            return;
        }
        let active = self.active_pods();
        let node = self.context.node.borrow().clone();
        let retry = Retry { trigger, sources_ready: self.ready.all(), active: &active, node: &node };
        let done = self.allocator.retry(retry).await;
        self.retry_at = Instant::now() + done.next;
        for uid in done.changed {
            if let Some(pod) = self.pods.pod(&uid).cloned() {
                self.hand_over(&pod, Cause::Update);
            }
        }
        for Preempt { admitted, .. } in done.preempt {
            self.preempt(None, admitted);
        }
    }

    /// Kills others for a critical pod in a task of its own; a pod given is admitted again then.
    fn preempt(&mut self, pod: Option<Arc<Pod>>, admitted: Admitted) {
        let commands = self.commands.clone();
        let events = self.context.events.clone();
        self.allocator.preempted(&admitted);
        self.context.tasks.spawn(async move {
            for victim in admitted.victims {
                events.record(Event::warning(victim.id(), preemption::REASON, preemption::MESSAGE));
                let status = StatusOverride {
                    reason: preemption::REASON.to_owned(),
                    message: preemption::MESSAGE.to_owned(),
                    disruption: Some((
                        preemption::CONDITION_REASON.to_owned(),
                        preemption::CONDITION_MESSAGE.to_owned(),
                    )),
                };
                if let Err(text) = kill_and_wait(&commands, &victim, None, Some(status)).await {
                    let message = "Container runtime did not kill the pod within specified grace period.";
                    events.record(Event::warning(victim.id(), "ExceededGracePeriod", message));
                    error!(pod = %victim.object_name(), err = %text, "Preemption: pod failed to evict");
                }
            }
            if let Some(pod) = pod {
                let _ = commands.send(Command::Preempted(pod)).await; // a closed loop needs no pod
            }
        });
    }

    async fn on_update(&mut self, pod: Arc<Pod>) {
        let old = self.pods.pod(pod.uid()).cloned();
        self.pods.upsert(pod.clone());
        self.changed = true;
        if pod.is_mirror() {
            self.poke_pod_of(&pod);
            return;
        }
        if old.is_some_and(|old| self.allocator.updated(&old, &pod)) {
            self.retry_resizes(Trigger::PodUpdated).await;
        }
        // A pod that was refused stays refused until it is deleted; only its end goes on.
        if !self.rejected.contains(pod.uid()) || pod.is_deleting() {
            self.hand_over(&pod, Cause::Update);
        }
    }

    async fn on_removal(&mut self, pod: &Arc<Pod>) {
        self.pods.remove(pod);
        self.changed = true;
        if pod.is_mirror() {
            self.poke_pod_of(pod);
            return;
        }
        self.rejected.remove(pod.uid());
        self.allocator.forget(pod.uid());
        if self.records.contains_key(pod.uid()) {
            self.stop_unwanted(pod.uid());
        } else {
            self.context.status.forget(pod.uid());
        }
        self.retry_resizes(Trigger::PodsRemoved).await;
    }

    async fn on_reconcile(&mut self, pod: Arc<Pod>) {
        let became_terminal =
            pod.is_api_terminal() && self.pods.pod(pod.uid()).is_some_and(|old| !old.is_api_terminal());
        self.pods.upsert(pod.clone());
        self.changed = true;
        if !pod.is_mirror() && became_terminal {
            self.hand_over(&pod, Cause::Update);
            self.retry_resizes(Trigger::PodTerminated).await;
        }
    }

    fn poke_pod_of(&mut self, mirror: &Pod) {
        if let Some(pod) = self.pods.pod_of_mirror(mirror).cloned() {
            self.hand_over(&pod, Cause::Update);
        }
    }

    /// Tells a pod's worker the latest definition; creates record and worker where there is none.
    fn hand_over(&mut self, pod: &Arc<Pod>, cause: Cause) {
        let allocated = self.allocator.allocated(pod);
        if let Some(record) = self.records.get_mut(pod.uid()) {
            if record.is_stopping() && cause == Cause::Create {
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
        // What is not known may be alive: a sync turn finds out.
        let alive = self.context.observer.may_be_alive(pod.uid());
        let record = Record {
            id: pod.id().clone(),
            life: Lifecycle::first(pod.is_api_terminal(), alive),
            pod: Some(allocated),
            wish: Wish::default(),
            state: State::Waiting,
            restart_requested: false,
            leftovers_seen: false,
        };
        self.records.insert(pod.uid().clone(), record);
        self.try_start(pod.uid(), cause);
    }

    /// Starts a record's worker unless it has to wait for its full name or for a removal.
    fn try_start(&mut self, uid: &PodUid, cause: Cause) {
        let Some(record) = self.records.get(uid) else { return };
        if !matches!(record.state, State::Waiting) || self.sweeping.contains(uid) {
            return;
        }
        let is_static = record.pod.as_ref().is_some_and(|pod| pod.is_static());
        let (id, name) = (record.id.clone(), record.id.full_name());
        if is_static && !(self.let_leftovers_first(uid, &name) && self.order.enter(&name, uid)) {
            debug!(pod = %id.object_name(), podUID = %uid, "Static pod waits for another of its name");
            return;
        }
        let Some(record) = self.records.get_mut(uid) else { return };
        let desired = Desired { pod: record.pod.clone(), wish: record.wish.clone(), cause, handed_at: Instant::now() };
        let handle = worker::spawn(self.context.clone(), record.id.clone(), record.life.clone(), desired);
        record.state = State::Working(handle);
    }

    /// A static pod that was changed while the agent was away still runs under its old UID: that
    /// one is taken down first, whatever the other sources have yet to tell (none of them can
    /// want a pod of the same name). False while the runtime has not shown what it holds.
    fn let_leftovers_first(&mut self, uid: &PodUid, name: &PodFullName) -> bool {
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
                    self.bury(&observed);
                }
                Some(record) if record.pod.is_none() && !record.life.is_terminated() => {
                    self.order.enter(name, &other);
                }
                Some(_) => {}
            }
        }
        true
    }

    /// Orders a pod to stop because nobody wants it any more, if its source may be believed.
    fn stop_unwanted(&mut self, uid: &PodUid) {
        let Some(record) = self.records.get(uid) else { return };
        let source = record.pod.as_ref().and_then(|pod| pod.source());
        if source.is_some_and(|source| !self.ready.is_ready(source)) {
            debug!(podUID = %uid, "Skipping delete because the source is not ready yet");
            return;
        }
        self.stop(uid, StopOrder { cause: StopCause::Deleted, grace_override: None, status: None });
    }

    fn stop(&mut self, uid: &PodUid, order: StopOrder) {
        let Some(record) = self.records.get_mut(uid) else { return };
        record.restart_requested = false;
        let folded = lifecycle::fold(record.wish.stop.take(), order);
        record.wish.stop = Some(folded);
        match record.state {
            State::Working(_) => send(record, Cause::Kill),
            State::Waiting => {
                // Never started: nothing runs, no runtime call is needed.
                record.state = State::Finished;
                record.life = Lifecycle::Finished { cause: StopCause::Deleted };
                self.leave_line(uid);
                self.on_finished(uid);
            }
            State::Finished => {
                record.life = record.life.clone().heed(&record.wish, record.pod.as_deref());
                self.on_finished(uid);
            }
        }
    }

    /// A worker says where its pod is.
    fn on_report(&mut self, report: Report) {
        let uid = &report.id.uid;
        let Some(record) = self.records.get_mut(uid) else { return };
        record.life = report.life;
        let (terminated, finished) = (record.life.is_terminated(), record.life.is_finished());
        if finished {
            record.state = State::Finished;
        }
        self.changed = true;
        if terminated {
            self.leave_line(uid);
        }
        if finished {
            self.on_finished(&uid.clone());
        }
    }

    fn leave_line(&mut self, uid: &PodUid) {
        let Some(record) = self.records.get(uid) else { return };
        if let Some(next) = self.order.leave(&record.id.full_name(), uid) {
            self.try_start(&next, Cause::Create);
        }
    }

    /// A finished pod is forgotten once nobody wants it; one that was asked for again restarts.
    fn on_finished(&mut self, uid: &PodUid) {
        let Some(record) = self.records.get(uid) else { return };
        if record.restart_requested {
            self.restart(uid);
        } else if !self.pods.contains(uid) {
            self.purge(uid);
        }
    }

    /// The same UID again: forget its first life and start a second one, without admission.
    fn restart(&mut self, uid: &PodUid) {
        self.purge(uid);
        if let Some(pod) = self.pods.pod(uid).cloned() {
            let label = crate::metrics::static_label(pod.is_static());
            self.context.metrics.restarted_pods.with_label_values(&[label]).inc();
            self.context.status.forget(uid);
            self.hand_over(&pod, Cause::Create);
        }
    }

    fn purge(&mut self, uid: &PodUid) {
        self.leave_line(uid);
        if self.records.remove(uid).is_none() {
            return;
        }
        self.context.runtime.forget(uid);
        if !self.pods.contains(uid) {
            self.context.status.forget(uid);
            self.allocator.forget(uid);
        }
        self.sweep_due = true;
        self.changed = true;
    }

    async fn on_command(&mut self, command: Command) {
        match command {
            Command::Poke(uid) => {
                if let Some(record) = self.records.get_mut(&uid) {
                    send(record, Cause::Sync);
                }
            }
            Command::Kill { uid, grace, status, reply } => {
                let order = StopOrder { cause: StopCause::Evicted, grace_override: grace, status };
                self.stop(&uid, order);
                let life = self.records.get(&uid).and_then(|record| match &record.state {
                    State::Working(handle) => Some(handle.life.clone()),
                    State::Waiting | State::Finished => None,
                });
                let _ = reply.send(life); // who asked may be gone
            }
            Command::Preempted(pod) => {
                self.preempting.remove(pod.uid());
                if let Some(pod) = self.pods.pod(pod.uid()).cloned() {
                    self.add(pod).await;
                }
            }
            Command::Describe(reply) => {
                let _ = reply.send(self.describe()); // who asked may be gone
            }
            Command::Swept(found) => self.on_swept(found),
            Command::SweepDone(uids) => {
                for uid in uids {
                    self.sweeping.remove(&uid);
                    self.try_start(&uid, Cause::Create);
                }
            }
        }
    }

    fn describe(&self) -> Vec<WorkerView> {
        let view = |record: &Record| WorkerView {
            id: record.id.clone(),
            life: record.life.clone(),
            stage: match &record.state {
                State::Working(handle) => Some(handle.stage.view()),
                State::Waiting | State::Finished => None,
            },
        };
        self.records.values().map(view).collect()
    }

    /// Desired pods that count for admission: not terminated, not rejected (spec 02 §2).
    fn active_pods(&self) -> Vec<Arc<Pod>> {
        let counts = |pod: &&Arc<Pod>| {
            let uid = pod.uid();
            let life = self.records.get(uid).map(|record| &record.life);
            !self.rejected.contains(uid)
                && !life.is_some_and(Lifecycle::is_terminated)
                && (!pod.is_api_terminal() || life.is_some_and(Lifecycle::is_stopping))
        };
        self.pods.pods().filter(counts).cloned().collect()
    }

    /// Whether the runtime already runs this very pod (the agent was restarted).
    fn runs_already(&self, pod: &Pod) -> bool {
        self.context.observer.known_pod(pod.uid()).is_some_and(|observed| observed.running().next().is_some())
    }

    fn publish(&mut self) {
        if !std::mem::take(&mut self.changed) {
            return;
        }
        let mut all: Vec<Arc<Pod>> = self.pods.pods().cloned().collect();
        all.sort_by(|a, b| (a.namespace(), a.name(), a.uid()).cmp(&(b.namespace(), b.name(), b.uid())));
        self.published.send_replace(Arc::new(all));
        let desired = self.pods.pods().map(|pod| (pod.uid().clone(), None));
        let mut pods: HashMap<PodUid, Option<Lifecycle>> = desired.collect();
        pods.extend(self.records.iter().map(|(uid, record)| (uid.clone(), Some(record.life.clone()))));
        self.fates.send_replace(Arc::new(Fates { sources_ready: self.ready.all(), pods }));
    }
}

/// Housekeeping: what no event told, every two seconds and cheap (spec 02a §11).
impl SyncLoop {
    async fn housekeeping(&mut self) {
        let begun = Instant::now();
        self.count();
        self.start_waiting();
        if Instant::now() >= self.retry_at {
            self.retry_resizes(Trigger::Periodic).await;
        }
        if !self.ready.all() {
            return;
        }
        let unwanted: Vec<PodUid> = self
            .records
            .iter()
            .filter(|(uid, record)| record.pod.is_some() && !self.pods.contains(uid) && record.wish.stop.is_none())
            .map(|(uid, _)| uid.clone())
            .collect();
        for uid in unwanted {
            self.stop_unwanted(&uid);
        }
        self.revive();
        self.bury_orphans();
        self.sweep();
        let taken = begun.elapsed();
        if taken > Duration::from_secs(1) {
            error!(expected = "1s", actual = ?taken, "Housekeeping took longer than expected");
        }
    }

    /// Active pods without a worker get one; without admission, they had it.
    fn revive(&mut self) {
        let known = |pod: &&Arc<Pod>| !self.records.contains_key(pod.uid());
        let wanted = |pod: &&Arc<Pod>| !self.rejected.contains(pod.uid()) && !pod.is_api_terminal();
        let forgotten: Vec<Arc<Pod>> = self.pods.pods().filter(known).filter(wanted).cloned().collect();
        for pod in forgotten.into_iter().filter(|pod| !self.preempting.contains(pod.uid())).collect::<Vec<_>>() {
            self.hand_over(&pod, Cause::Create);
        }
    }

    /// Static pods that wait for the first list of the runtime.
    fn start_waiting(&mut self) {
        let waits = |record: &Record| matches!(record.state, State::Waiting) && !record.leftovers_seen;
        let held = self.records.iter().filter(|(_, record)| waits(record)).map(|(uid, _)| uid.clone());
        for uid in held.collect::<Vec<_>>() {
            self.try_start(&uid, Cause::Create);
        }
    }

    /// Takes down what the runtime holds although nobody knows it, be it alive or dead.
    fn bury_orphans(&mut self) {
        let Some(known) = self.context.observer.known() else { return };
        for (uid, observed) in known.pods {
            if self.records.contains_key(&uid) || self.pods.contains(&uid) {
                continue;
            }
            self.bury(&observed);
        }
    }

    /// A worker for what only the runtime knows; it takes it down.
    fn bury(&mut self, observed: &ObservedPod) {
        let id = observed.id.clone();
        if observed.is_alive() {
            info!(pod = %id.object_name(), podUID = %id.uid, "Killing a pod that nobody wants");
            self.context.metrics.orphaned_runtime_pods.inc();
        }
        let record = Record {
            id: id.clone(),
            pod: None,
            wish: Wish::default(),
            // Known at once, so that a pod of this UID that comes now starts after it.
            life: Lifecycle::Syncing.heed(&Wish::default(), None),
            state: State::Waiting,
            restart_requested: false,
            leftovers_seen: true,
        };
        self.records.insert(id.uid.clone(), record);
        self.try_start(&id.uid, Cause::Kill);
    }

    /// Looks for directories and cgroups of pods that are gone, in a task of its own.
    fn sweep(&mut self) {
        let overdue = self.heartbeat.since_sweep() >= SWEEP_PERIOD;
        if !(self.sweep_due || overdue) || !self.sweeping.is_empty() {
            return;
        }
        self.sweep_due = false;
        self.heartbeat.swept();
        let (context, commands) = (self.context.clone(), self.commands.clone());
        self.context.tasks.spawn(async move {
            let found =
                Found { directories: context.volumes.pods_on_disk().await, cgroups: context.resources.pods().await };
            let _ = commands.send(Command::Swept(found)).await; // a closed loop sweeps no more
        });
    }

    /// Removes what was found of pods that nobody knows; a pod of such a UID that comes
    /// meanwhile waits until its leftovers are gone.
    fn on_swept(&mut self, found: Found) {
        let Some(known) = self.context.observer.known() else { return };
        let gone =
            |uid: &PodUid| !self.records.contains_key(uid) && !self.pods.contains(uid) && !known.pods.contains_key(uid);
        let directories: Vec<PodUid> = found.directories.into_iter().filter(gone).collect();
        let cgroups: Vec<PodUid> = found.cgroups.into_iter().filter(gone).collect();
        if directories.is_empty() && cgroups.is_empty() {
            return;
        }
        self.sweeping.extend(directories.iter().chain(&cgroups).cloned());
        let all: Vec<PodUid> = self.sweeping.iter().cloned().collect();
        let (context, commands) = (self.context.clone(), self.commands.clone());
        self.context.tasks.spawn(async move {
            for uid in directories {
                if let Err(error) = context.volumes.remove_directory(&uid).await {
                    debug!(podUID = %uid, err = %error, "Orphaned pod directory stays");
                }
            }
            for uid in cgroups {
                let id = PodRef { uid: uid.clone(), name: "".into(), namespace: "".into() };
                if let Err(error) = context.resources.remove(&id).await {
                    debug!(podUID = %uid, err = %error, "Orphaned pod cgroup stays");
                }
            }
            let _ = commands.send(Command::SweepDone(all)).await; // a closed loop waits for nothing
        });
    }

    fn count(&self) {
        let metrics = &self.context.metrics;
        let mut desired = [0_i64; 2];
        for pod in self.pods.pods() {
            desired[usize::from(pod.is_static())] += 1;
        }
        let mut active = [0_i64; 2];
        for pod in self.active_pods() {
            active[usize::from(pod.is_static())] += 1;
        }
        for (i, label) in ["", "true"].into_iter().enumerate() {
            metrics.desired_pods.with_label_values(&[label]).set(desired[i]);
            metrics.active_pods.with_label_values(&[label]).set(active[i]);
        }
        metrics.mirror_pods.set(count(self.pods.mirrors().count()));
        metrics.ephemeral_containers.set(count(self.pods.pods().map(|p| p.ephemeral_containers().len()).sum()));
        let mut working = crate::metrics::WorkingPods::new();
        for (uid, record) in &self.records {
            let (config, is_static) = match &record.pod {
                None => ("runtime_only", "unknown"),
                Some(pod) => {
                    let config = if self.pods.contains(uid) { "desired" } else { "orphan" };
                    (config, crate::metrics::static_label(pod.is_static()))
                }
            };
            *working.entry((record.life.label(), config, is_static)).or_default() += 1;
        }
        metrics.set_working(&working);
    }
}

fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn send(record: &Record, cause: Cause) {
    if let State::Working(handle) = &record.state {
        let desired = Desired { pod: record.pod.clone(), wish: record.wish.clone(), cause, handed_at: Instant::now() };
        handle.desired.send_replace(desired);
    }
}

/// Kills a pod and waits until nothing of it runs: at most max(10 s, 1.5 × grace) (spec 02a §7).
///
/// # Errors
/// `timeout waiting to kill pod`.
pub async fn kill_and_wait(
    commands: &mpsc::Sender<Command>,
    pod: &Pod,
    grace: Option<i64>,
    status: Option<StatusOverride>,
) -> Result<(), String> {
    let limit = kill_wait(grace, pod.spec().termination_grace_period_seconds);
    let (reply, answer) = oneshot::channel();
    let closed = || "the sync loop is gone".to_owned();
    commands.send(Command::Kill { uid: pod.uid().clone(), grace, status, reply }).await.map_err(|_| closed())?;
    let Some(mut life) = answer.await.map_err(|_| closed())? else { return Ok(()) };
    match tokio::time::timeout(limit, life.wait_for(Lifecycle::is_terminated)).await {
        Ok(_) => Ok(()), // a worker that is gone runs nothing
        Err(_) => Err("timeout waiting to kill pod".to_owned()),
    }
}
