//! Sync loop: the task that owns the desired pods, their workers, and the start order.
//!
//! ```text
//!  mux ──changes──►  ┌───────────┐ ──desired──► worker (one per pod)
//!  workers ─reports─►│ sync loop │
//!  others ─commands─►└───────────┘ ──snapshot─► server, status
//!  2 s tick ─────────────▲
//! ```
//!
//! The loop decides and dispatches, and never blocks: work that can block for one pod runs in that
//! pod's worker or in a separate task. Implements spec 02a §3, §4, §9, §11, with the improvements of
//! §14 (readiness per source, immediate restarts, a runtime outage only blocks runtime calls).

mod commands;
mod housekeeping;
mod mux_operations;
mod records;

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::{mpsc, watch},
    time::{Instant, MissedTickBehavior},
};
use tracing::info;

pub use commands::{Leftovers, SyncLoopCommand, WorkerView, kill_and_wait};
use records::PodWorkerRecord;

use super::{
    allocation::Allocator,
    lifecycle::Lifecycle,
    pod_manager::PodManager,
    pod_snapshot::{PodReader, PodSnapshot},
    source_readiness::SourceReadiness,
    static_order::StaticOrder,
    sync_loop_liveness::SyncLoopLiveness,
    wall_clock::WallClock,
    worker::{Report, WorkerContext},
    worker_status::{PodWorkerStatus, StartWait},
};
use berth_types::{Pod, PodChange, PodUid};

/// Handle to the sync loop: command channel and published snapshot.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    /// Sender of commands.
    pub commands: mpsc::Sender<SyncLoopCommand>,
    /// All pods: desired ones, lifecycles, workers.
    pub pods: PodReader,
    /// Liveness timestamps of the loop.
    pub heartbeat: SyncLoopLiveness,
}

/// Channels and collaborators that the sync loop takes over.
pub struct SyncLoopInputs {
    /// Operations of the mux.
    pub changes: mpsc::Receiver<PodChange>,
    /// Reports of the workers.
    pub reports: mpsc::Receiver<Report>,
    /// Readiness of the registered sources.
    pub ready: SourceReadiness,
    /// Admission and allocation.
    pub allocator: Allocator,
}

/// State of the sync loop task; see the module documentation.
pub struct SyncLoop {
    context: Arc<WorkerContext>,
    commands: mpsc::Sender<SyncLoopCommand>,
    pods: PodManager,
    records: HashMap<PodUid, PodWorkerRecord>,
    order: StaticOrder,
    ready: SourceReadiness,
    allocator: Allocator,
    retry_at: Instant,
    /// Pods whose admission is to be retried: what they wait for, and since when.
    awaiting_admission: HashMap<PodUid, (StartWait, Instant)>,
    /// Pods whose admission was retried after a node affinity rejection.
    retried_admission: HashSet<PodUid>,
    rejected: HashSet<PodUid>,
    sweeping: HashSet<PodUid>,
    sweep_due: bool,
    published: watch::Sender<Arc<PodSnapshot>>,
    changed: bool,
    heartbeat: SyncLoopLiveness,
    wall_clock: WallClock,
}

/// Timeout for the first list of the runtime; afterwards pods are processed without it.
const FIRST_LIST: Duration = Duration::from_secs(5);

/// Spawns the sync loop.
pub fn start(context: Arc<WorkerContext>, mut inputs: SyncLoopInputs) -> EngineHandle {
    let (commands, received) = mpsc::channel(256);
    let (published, snapshots) = watch::channel(Arc::default());
    let heartbeat = SyncLoopLiveness::new();
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
        awaiting_admission: HashMap::new(),
        retried_admission: HashSet::new(),
        rejected: HashSet::new(),
        sweeping: HashSet::new(),
        sweep_due: true,
        published,
        changed: true,
        heartbeat: heartbeat.clone(),
        wall_clock: WallClock::default(),
    };
    context.tasks.spawn(sync_loop.run(inputs.changes, inputs.reports, received));
    EngineHandle { commands, pods: PodReader::new(snapshots), heartbeat }
}

impl SyncLoop {
    async fn run(
        mut self,
        mut changes: mpsc::Receiver<PodChange>,
        mut reports: mpsc::Receiver<Report>,
        mut commands: mpsc::Receiver<SyncLoopCommand>,
    ) {
        info!("Starting kubelet main sync loop");
        let mut tick = tokio::time::interval(self.context.config.housekeeping_period);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let shutdown = self.context.shutdown.clone();
        let mut sources_open = true;
        // Admission and restarts depend on what already runs; a runtime that is down does not block the
        // loop.
        let observer = self.context.observer.clone();
        let first_list = tokio::time::timeout(FIRST_LIST, observer.list());
        tokio::pin!(first_list);
        let mut listed = false;
        loop {
            self.heartbeat.record_iteration();
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

    fn publish(&mut self) {
        if !std::mem::take(&mut self.changed) {
            return;
        }
        let mut desired: Vec<Arc<Pod>> = self.pods.pods().cloned().collect();
        desired.sort_by(|a, b| (a.namespace(), a.name(), a.uid()).cmp(&(b.namespace(), b.name(), b.uid())));
        let mut lifecycles: HashMap<PodUid, Option<Lifecycle>> =
            desired.iter().map(|pod| (pod.uid().clone(), None)).collect();
        lifecycles.extend(self.records.iter().map(|(uid, record)| (uid.clone(), Some(record.life.clone()))));
        let awaiting = self.awaiting_admission.iter().filter(|(uid, _)| !self.records.contains_key(*uid));
        let awaiting = awaiting.filter_map(|(uid, line)| {
            let id = self.pods.pod(uid)?.id().clone();
            Some(PodWorkerStatus { id, life: Lifecycle::Syncing, progress: None, line: Some(*line) })
        });
        let workers = self.records.values().map(PodWorkerRecord::standing).chain(awaiting).collect();
        let (sources_ready, desired) = (self.ready.all(), Arc::new(desired));
        self.published.send_replace(Arc::new(PodSnapshot { sources_ready, desired, lifecycles, workers }));
    }
}
