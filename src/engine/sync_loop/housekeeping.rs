//! Housekeeping of the sync loop: periodic reconciliation of what no event reported (spec 02a §11).
//!
//! Runs every two seconds and must stay cheap; blocking work runs in separate tasks.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use futures::StreamExt;
use tokio::time::Instant;
use tracing::{debug, error, info};

use super::{
    Leftovers, SyncLoop, SyncLoopCommand,
    records::{PodWorkerRecord, RecordState, send},
};
use crate::engine::{
    allocation::Trigger,
    lifecycle::{DesiredState, Lifecycle},
    worker::SyncPodType,
    worker_status::StartWait,
};
use berth_ports::MirrorPodState;
use berth_types::{Pod, PodFullName, PodRef, PodUid, observation::ObservedPod};

/// Period of sweeps for leftovers on disk when no pod was removed.
const SWEEP_PERIOD: Duration = Duration::from_secs(60);
/// Number of pods whose leftovers are removed concurrently.
const SWEEPERS: usize = 4;

impl SyncLoop {
    pub(super) async fn housekeeping(&mut self) {
        let begun = Instant::now();
        self.count();
        self.check_wall_clock();
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
            .filter(|(uid, record)| record.pod.is_some() && !self.pods.contains(uid) && record.desired.stop.is_none())
            .map(|(uid, _)| uid.clone())
            .collect();
        for uid in unwanted {
            self.stop_unwanted(&uid);
        }
        self.recreate_workers();
        self.terminate_orphans();
        self.context.mirrors.set_desired(self.mirror_pod_states());
        self.sweep();
        let taken = begun.elapsed();
        if taken > Duration::from_secs(1) {
            error!(expected = "1s", actual = ?taken, "Housekeeping took longer than expected");
        }
    }

    /// Resyncs pods with an active deadline after the wall clock was set or the machine slept.
    fn check_wall_clock(&mut self) {
        let (wall, uptime) = (self.context.clock.now(), self.heartbeat.since_start());
        let Some(jump) = self.wall_clock.detect_jump(wall, uptime) else { return };
        info!(by = ?jump, "Wall clock jumped, resyncing pods with an active deadline");
        let has_deadline = |record: &&PodWorkerRecord| {
            record.pod.as_ref().is_some_and(|pod| pod.spec().active_deadline_seconds.is_some())
        };
        self.records.values().filter(has_deadline).for_each(|record| send(record, SyncPodType::Sync));
    }

    /// Recreates workers of active pods that have none; these pods were already admitted.
    fn recreate_workers(&mut self) {
        let known = |pod: &&Arc<Pod>| !self.records.contains_key(pod.uid());
        let wanted = |pod: &&Arc<Pod>| !self.rejected.contains(pod.uid()) && !pod.is_api_terminal();
        let forgotten: Vec<Arc<Pod>> = self.pods.pods().filter(known).filter(wanted).cloned().collect();
        for pod in
            forgotten.into_iter().filter(|pod| !self.awaiting_admission.contains_key(pod.uid())).collect::<Vec<_>>()
        {
            self.dispatch(&pod, SyncPodType::Create);
        }
    }

    /// Full names that may have a mirror pod: desired static pods, and pods that are terminating.
    fn mirror_pod_states(&self) -> HashMap<PodFullName, MirrorPodState> {
        let going = self.records.values().map(|record| (record.id.full_name(), MirrorPodState::Terminating));
        let fixed = self.pods.pods().filter(|pod| pod.is_static());
        going.chain(fixed.map(|pod| (pod.full_name(), MirrorPodState::Desired(pod.uid().clone())))).collect()
    }

    /// Retries static pods that wait for the first list of the runtime.
    fn start_waiting(&mut self) {
        let waits =
            |record: &PodWorkerRecord| matches!(record.state, RecordState::Waiting(..)) && !record.leftovers_seen;
        let waiting = self.records.iter().filter(|(_, record)| waits(record)).map(|(uid, _)| uid.clone());
        for uid in waiting.collect::<Vec<_>>() {
            self.try_start(&uid, SyncPodType::Create);
        }
    }

    /// Terminates pods that exist in the runtime only, running or not.
    fn terminate_orphans(&mut self) {
        let Some(known) = self.context.observer.known() else { return };
        for (uid, observed) in known.pods {
            if self.records.contains_key(&uid) || self.pods.contains(&uid) {
                continue;
            }
            self.terminate_orphan(&observed);
        }
    }

    /// Creates a record and a worker that terminates a pod that only the runtime knows.
    pub(super) fn terminate_orphan(&mut self, observed: &ObservedPod) {
        let id = observed.id.clone();
        if observed.is_alive() {
            info!(pod = %id.object_name(), podUID = %id.uid, "Clean up containers for orphaned pod we had not seen before");
            self.context.metrics.orphaned_runtime_pods.inc();
        }
        let record = PodWorkerRecord {
            id: id.clone(),
            pod: None,
            desired: DesiredState::default(),
            // Terminating from the start, so that a new pod of this UID starts only afterwards.
            life: Lifecycle::Syncing.apply(&DesiredState::default(), None),
            state: RecordState::Waiting(StartWait::Removal, Instant::now()),
            restart_requested: false,
            leftovers_seen: true,
        };
        self.records.insert(id.uid.clone(), record);
        self.try_start(&id.uid, SyncPodType::Kill);
    }

    /// Looks for directories and cgroups of deleted pods in a separate task.
    fn sweep(&mut self) {
        let overdue = self.heartbeat.since_sweep() >= SWEEP_PERIOD;
        if !(self.sweep_due || overdue) || !self.sweeping.is_empty() {
            return;
        }
        self.sweep_due = false;
        self.heartbeat.record_sweep();
        self.remove_stale_state();
        let (context, commands) = (self.context.clone(), self.commands.clone());
        self.context.tasks.spawn(async move {
            let found = Leftovers {
                directories: context.volumes.pods_on_disk().await,
                cgroups: context.resources.pods().await,
            };
            let _ = commands.send(SyncLoopCommand::SweepResult(found)).await; // the sync loop may have ended
        });
    }

    /// Removes state, also from state files, of pods that were deleted while the agent was not running.
    fn remove_stale_state(&mut self) {
        let desired = self.pods.pods().map(|pod| pod.uid());
        let known: HashSet<PodUid> = desired.chain(self.records.keys()).cloned().collect();
        self.allocator.retain(&known);
        self.context.status.retain(&known);
        self.context.runtime.retain(&known);
        self.context.claims.reconcile(&known);
    }

    /// Removes leftovers of unknown pods; a new pod of such a UID waits until its leftovers are
    /// removed.
    pub(super) fn on_swept(&mut self, found: Leftovers) {
        let Some(known) = self.context.observer.known() else { return };
        let nobodys =
            |uid: &PodUid| !self.records.contains_key(uid) && !self.pods.contains(uid) && !known.pods.contains_key(uid);
        let gone = |uid: &PodUid| nobodys(uid) && !self.sweeping.contains(uid);
        let directories: HashSet<PodUid> = found.directories.into_iter().filter(gone).collect();
        let cgroups: HashSet<PodUid> = found.cgroups.into_iter().filter(gone).collect();
        let all: Vec<PodUid> = directories.union(&cgroups).cloned().collect();
        self.sweeping.extend(all.iter().cloned());
        let (context, commands) = (self.context.clone(), self.commands.clone());
        self.context.tasks.spawn(async move {
            let (context, commands, directories, cgroups) = (&context, &commands, &directories, &cgroups);
            let remove = |uid: PodUid| async move {
                if directories.contains(&uid)
                    && let Err(error) = context.volumes.remove_directory(&uid).await
                {
                    debug!(podUID = %uid, err = %error, "Failed to remove orphaned pod directory");
                }
                let id = PodRef { uid, name: "".into(), namespace: "".into() };
                if cgroups.contains(&id.uid)
                    && let Err(error) = context.resources.remove(&id).await
                {
                    debug!(podUID = %id.uid, err = %error, "Failed to remove orphaned pod cgroup");
                }
                let _ = commands.send(SyncLoopCommand::SweepDone(id.uid)).await; // the sync loop may have ended
            };
            futures::stream::iter(all).for_each_concurrent(SWEEPERS, remove).await;
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
        let mut working = berth_metrics::WorkingPods::new();
        for (uid, record) in &self.records {
            let (config, is_static) = match &record.pod {
                None => ("runtime_only", "unknown"),
                Some(pod) => {
                    let config = if self.pods.contains(uid) { "desired" } else { "orphan" };
                    (config, berth_metrics::static_label(pod.is_static()))
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
