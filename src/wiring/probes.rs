//! Wires probes to the status manager and the sync loop.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

use super::composition_root::{Base, BuildError, wrong};
use crate::{
    engine::SyncLoopCommand,
    probes::{self, Handlers},
};
use berth_cri::CriClients;
use berth_metrics::{ProbeMetrics, ProbeTimelinessMetrics, Registry};
use berth_ports::{Clock, DiskStateFile, ProbedPods, ProbedStatus};
use berth_status::{StatusManager, restart_all_in_progress};
use berth_types::{ContainerId, Pod, PodUid};

/// The running probes.
pub(super) struct Probes {
    /// Probe manager.
    pub(super) manager: Arc<probes::ProbeManagerHandle>,
    /// Registry of the probe metrics.
    pub(super) registry: Registry,
    woken: Arc<WakeSet>,
}

/// Starts the tasks of probes; nothing is probed before a pod worker adds its pod.
///
/// # Errors
/// TLS cannot be set up.
pub(super) async fn open(
    base: &Base,
    connection: &CriClients,
    statuses: Arc<StatusManager>,
    file: Arc<DiskStateFile>,
) -> Result<Probes, BuildError> {
    let registry = Registry::new();
    let woken = Arc::<WakeSet>::default();
    let deps = probes::ProbeDeps {
        asker: Arc::new(Handlers::new(connection.runtime.clone()).map_err(wrong)?),
        pods: Arc::new(ProbedPodStatuses { statuses, clock: base.clock.clone(), woken: woken.clone() }),
        events: base.events.clone(),
        clock: base.clock.clone(),
        metrics: ProbeMetrics::new(&registry),
        paces: ProbeTimelinessMetrics::new(&base.registry),
        started_at: base.clock.now(),
        liveness: base.liveness.of("probes"),
    };
    let (manager, probing, saving) = probes::open(deps, file, base.stop.child_token()).await;
    base.tasks.spawn(probing);
    base.tasks.spawn(saving);
    Ok(Probes { manager, registry, woken })
}

impl Probes {
    /// Wakes pods through the sync loop from now on.
    pub(super) fn wake_through(&self, base: &Base, commands: mpsc::Sender<SyncLoopCommand>) {
        base.tasks.spawn(wake(self.woken.clone(), commands, base.stop.child_token()));
    }
}

/// Set of pods to wake: repeated wake-ups coalesce.
#[derive(Default)]
struct WakeSet {
    pods: Mutex<HashSet<PodUid>>,
    some: Notify,
}

impl WakeSet {
    fn insert(&self, pod: &PodUid) {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner).insert(pod.clone());
        self.some.notify_one();
    }

    fn take(&self) -> HashSet<PodUid> {
        std::mem::take(&mut *self.pods.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

async fn wake(woken: Arc<WakeSet>, commands: mpsc::Sender<SyncLoopCommand>, stop: CancellationToken) {
    while stop.run_until_cancelled(woken.some.notified()).await.is_some() {
        for pod in woken.take() {
            if commands.send(SyncLoopCommand::Resync(pod)).await.is_err() {
                return;
            }
        }
    }
}

/// [`ProbedPods`] of the status manager.
struct ProbedPodStatuses {
    statuses: Arc<StatusManager>,
    clock: Arc<dyn Clock>,
    woken: Arc<WakeSet>,
}

impl ProbedPods for ProbedPodStatuses {
    fn status(&self, pod: &PodUid) -> Option<ProbedStatus> {
        let status = self.statuses.status(pod)?;
        let restart_all = restart_all_in_progress(&status);
        Some(ProbedStatus { status, restart_all })
    }

    fn changes(&self) -> u64 {
        self.statuses.stored()
    }

    fn set_ready(&self, pod: &Pod, container: &ContainerId, ready: bool) {
        self.statuses.set_ready(pod, container, ready, self.clock.now());
    }

    fn set_started(&self, pod: &Pod, container: &ContainerId, started: bool) {
        self.statuses.set_started(pod, container, started, self.clock.now());
    }

    fn wake(&self, pod: &PodUid) {
        self.woken.insert(pod);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_pod_that_is_woken_often_is_poked_once() {
        let woken = Arc::<WakeSet>::default();
        for pod in ["a", "b", "a"] {
            woken.insert(&pod.into());
        }
        let (commands, mut poked) = mpsc::channel(8);
        let stop = CancellationToken::new();
        let waking = tokio::spawn(wake(woken.clone(), commands, stop.clone()));
        let mut seen = Vec::new();
        for _ in 0..2 {
            let Some(SyncLoopCommand::Resync(pod)) = poked.recv().await else { panic!("a pod to wake") };
            seen.push(pod.to_string());
        }
        seen.sort();
        assert_eq!(seen, ["a", "b"]);
        woken.insert(&"c".into());
        assert!(matches!(poked.recv().await, Some(SyncLoopCommand::Resync(pod)) if pod.as_str() == "c"));
        stop.cancel();
        waking.await.expect("it ends");
        assert!(poked.recv().await.is_none());
    }
}
