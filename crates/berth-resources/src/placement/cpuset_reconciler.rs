//! Reconciler of the CPU sets of running containers (spec 06b §1.11).
//!
//! Runs after each change of the shared pool, when pods end, and periodically as a safety net. Updates of containers
//! run side by side, so one that hangs delays no other.

use std::{collections::HashSet, path::PathBuf, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures::{Stream, StreamExt, stream};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error};

use super::manager::{AppliedContainer, PlacementManager};
use crate::topology::online_cpus;
use berth_types::{ContainerId, CpuSet, PodUid};

/// Number of updates at a time.
const CONCURRENT: usize = 32;
/// Timeout of an update; the next pass repeats it. The pass waits for all updates, and creations wait for the pass.
const UPDATE: Duration = Duration::from_secs(2);

/// A container that runs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RunningContainer {
    /// UID of its pod.
    pub pod: PodUid,
    /// Name in the pod.
    pub name: String,
    /// ID in the runtime.
    pub id: ContainerId,
}

/// Source of pods and running containers. Never blocks.
pub trait PodContainers: Send + Sync + 'static {
    /// Pods that keep their resources; `None` while a source is not ready.
    fn active(&self) -> Option<HashSet<PodUid>>;
    /// Containers that run, as last observed; `None` before the first observation.
    fn running(&self) -> Option<Vec<RunningContainer>>;
}

/// Changes the CPU set of a container in the runtime.
#[async_trait]
pub trait CpusetUpdater: Send + Sync + 'static {
    /// Sets the CPUs and nothing else. Has a deadline.
    ///
    /// # Errors
    /// The text of the runtime's error.
    async fn set_cpus(&self, container: &ContainerId, cpus: &CpuSet) -> Result<(), String>;
}

/// Dependencies of the reconciler.
pub struct CpusetReconcilerDeps {
    /// Pods and running containers.
    pub containers: Arc<dyn PodContainers>,
    /// The runtime.
    pub updater: Arc<dyn CpusetUpdater>,
    /// `/`, or a directory with a copy of `/sys`: online CPUs are read below it.
    pub root: PathBuf,
    /// Time between periodic passes; at least 1 s.
    pub period: Duration,
    /// Whether a CPU that went offline stays excluded when it is online again: cgroup v1 removes it from all cgroups
    /// for good.
    pub keeps_offline: bool,
}

/// Reconciles until `shutdown`: when the pool changes, when `pods_changed` yields, and periodically.
pub async fn reconcile_cpusets(
    manager: Arc<PlacementManager>,
    deps: CpusetReconcilerDeps,
    pods_changed: impl Stream<Item = ()> + Send,
    shutdown: CancellationToken,
) {
    let CpusetReconcilerDeps { containers, updater, root, period, keeps_offline } = deps;
    if manager.policies.cpu.is_none() && manager.policies.memory.is_none() {
        return;
    }
    let mut changes = manager.changes.subscribe();
    let mut ticks = interval(period.max(Duration::from_secs(1)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut pods_changed = std::pin::pin!(pods_changed.fuse());
    loop {
        let is_periodic = tokio::select! {
            () = shutdown.cancelled() => return,
            changed = changes.changed() => { if changed.is_err() { return; } false }
            Some(()) = pods_changed.next() => false,
            _ = ticks.tick() => true,
        };
        if is_periodic && let Ok(online) = online_cpus(&root) {
            manager.set_online(&online, keeps_offline);
        }
        if let Some(active) = containers.active() {
            manager.retain_published(&active);
        }
        let number = *changes.borrow_and_update();
        // Before the first observation there may be running containers that are unknown.
        let Some(running) = containers.running() else { continue };
        let pass = update_running(&manager, &running, &*updater);
        if shutdown.run_until_cancelled(pass).await.is_none() {
            return;
        }
        manager.reconciled.send_replace(number);
    }
}

/// Updates each running or created container whose CPUs differ from those that it was given last.
async fn update_running(manager: &PlacementManager, running: &[RunningContainer], updater: &dyn CpusetUpdater) {
    if manager.policies.cpu.is_none() {
        return;
    }
    let updates = manager.due_updates(running);
    stream::iter(updates)
        .for_each_concurrent(CONCURRENT, async |(container, cpus)| {
            debug!(podUID = %container.pod, containerName = container.name, containerID = %container.id, cpuSet = %cpus, "Updating CPU set of container");
            let updated = timeout(UPDATE, updater.set_cpus(&container.id, &cpus)).await;
            let updated = updated.unwrap_or_else(|_| Err(format!("no response within {} s", UPDATE.as_secs())));
            manager.record_update(container, cpus, updated);
        })
        .await;
}

impl PlacementManager {
    /// Containers that need an update, with their CPUs: those that run, and those that were created and not observed
    /// yet. Forgets containers that no longer run.
    fn due_updates(&self, running: &[RunningContainer]) -> Vec<(RunningContainer, CpuSet)> {
        let mut applied = self.applied();
        let ids: HashSet<&ContainerId> = running.iter().map(|container| &container.id).collect();
        applied.containers.retain(|id, container| {
            let runs = ids.contains(id);
            let stays = runs || !container.is_observed;
            container.is_observed |= runs;
            stays
        });
        let created = applied.containers.iter().filter(|(_, container)| !container.is_observed);
        let created = created.map(|(id, container)| RunningContainer {
            pod: container.pod.clone(),
            name: container.name.clone(),
            id: id.clone(),
        });
        let (shared, assignments) = {
            let state = self.state();
            (state.shared(), state.cpu.assignments.clone())
        };
        let mut due = Vec::new();
        for container in created.chain(running.iter().cloned()) {
            let own = assignments.get(&container.pod).and_then(|containers| containers.get(&container.name));
            let cpus = own.unwrap_or(&shared);
            // An empty set means "all CPUs" to the runtime: an empty shared pool is never applied.
            if cpus.is_empty() {
                continue;
            }
            // Exclusive CPUs of the checkpoint were given to the container when it was created.
            let restored = self.restored.get(&container.pod).and_then(|containers| containers.get(&container.name));
            let last = applied.containers.get(&container.id).map(|applied| &applied.cpus).or(restored);
            if last != Some(cpus) {
                due.push((container, cpus.clone()));
            }
        }
        due
    }

    fn record_update(&self, container: RunningContainer, cpus: CpuSet, updated: Result<(), String>) {
        let RunningContainer { pod, name, id } = container;
        let mut applied = self.applied();
        match updated {
            Ok(()) => {
                let is_observed = applied.containers.get(&id).is_none_or(|container| container.is_observed);
                applied.containers.insert(id, AppliedContainer { pod, name, cpus, is_observed });
            }
            // The start may have failed, so that the container is gone.
            Err(err) if applied.containers.get(&id).is_some_and(|container| !container.is_observed) => {
                debug!(podUID = %pod, containerName = name, containerID = %id, err, "Failed to update created container");
                applied.containers.remove(&id);
            }
            Err(err) => {
                error!(podUID = %pod, containerName = name, containerID = %id, cpuSet = %cpus, err, "ReconcileState: failed to update container");
            }
        }
    }
}
