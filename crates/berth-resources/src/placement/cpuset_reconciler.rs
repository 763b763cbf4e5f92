//! Reconciler of the CPU sets of running containers (spec 06b §1.11).
//!
//! Runs after each change of the shared pool, when pods end, and periodically as a safety net. Updates of containers run
//! side by side, so one that hangs delays no other.

use std::{
    collections::{BTreeMap, HashSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use futures::{Stream, StreamExt, stream};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error};

use super::manager::PlacementManager;
use crate::topology::online_cpus;
use berth_ports::ContainerPlacements;
use berth_types::{ContainerId, CpuSet, PodUid};

/// Number of updates at a time.
const CONCURRENT: usize = 16;

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
}

/// Reconciles until `shutdown`: when the pool changes, when `pods_changed` yields, and periodically.
pub async fn reconcile_cpusets(
    manager: Arc<PlacementManager>,
    deps: CpusetReconcilerDeps,
    pods_changed: impl Stream<Item = ()> + Send,
    shutdown: CancellationToken,
) {
    let CpusetReconcilerDeps { containers, updater, root, period } = deps;
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
            manager.set_online(&online);
        }
        if let Some(active) = containers.active() {
            manager.retain_published(&active);
        }
        let number = *changes.borrow_and_update();
        let pass = update_running(&manager, &*containers, &*updater, is_periodic);
        if shutdown.run_until_cancelled(pass).await.is_none() {
            return;
        }
        manager.reconciled.send_replace(number);
    }
}

/// Updates each running container whose CPUs differ from those that it was given last.
async fn update_running(
    manager: &PlacementManager,
    containers: &dyn PodContainers,
    updater: &dyn CpusetUpdater,
    is_periodic: bool,
) {
    let Some(running) = containers.running().filter(|_| manager.policies.cpu.is_some()) else { return };
    let updates = manager.due_updates(&running, is_periodic);
    stream::iter(updates)
        .for_each_concurrent(CONCURRENT, async |(container, cpus)| {
            debug!(podUID = %container.pod, containerName = container.name, containerID = %container.id, cpuSet = %cpus, "Updating CPU set of container");
            match updater.set_cpus(&container.id, &cpus).await {
                Ok(()) => {
                    manager.applied().containers.insert(container.id.clone(), cpus);
                }
                Err(err) => {
                    error!(podUID = %container.pod, containerName = container.name, containerID = %container.id, cpuSet = %cpus, err, "ReconcileState: failed to update container");
                }
            }
        })
        .await;
}

impl PlacementManager {
    /// Running containers that need an update, with their CPUs. A periodic pass forgets containers that are gone.
    fn due_updates(&self, running: &[RunningContainer], forgets: bool) -> Vec<(RunningContainer, CpuSet)> {
        let mut applied = self.applied();
        if forgets {
            let ids: HashSet<&ContainerId> = running.iter().map(|container| &container.id).collect();
            let pods: HashSet<&PodUid> = running.iter().map(|container| &container.pod).collect();
            applied.containers.retain(|id, _| ids.contains(id));
            applied.prepared.retain(|(pod, _), _| pods.contains(pod));
        }
        let mut due = Vec::new();
        for container in running {
            let placement = self.placement(&container.pod, &container.name);
            // An empty set means "all CPUs" to the runtime: an empty shared pool is never applied.
            if placement.cpus.is_empty() {
                continue;
            }
            // Exclusive CPUs of the checkpoint were given to the container when it was created.
            let restored = self
                .restored
                .get(&container.pod)
                .and_then(|containers: &BTreeMap<_, _>| containers.get(&container.name));
            let last = applied.containers.get(&container.id).or(restored);
            if last != Some(&placement.cpus) {
                due.push((container.clone(), placement.cpus));
            }
        }
        due
    }
}
