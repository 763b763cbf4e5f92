//! Pod diagnostics: `/debug/why/{namespace}/{pod}` and the metric `berth_pod_waiting_seconds`.
//!
//! Reports why a pod is in its current state and how long pods wait for what. Reads snapshots only, so that it answers
//! even if everything else hangs.

mod current_wait;
mod document;

use std::{collections::HashMap, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::time::Instant;

use current_wait::current_wait;
pub use document::{
    ContainerDiagnosis, Exit, PodDiagnosis, Probe, ProbeRun, StageTiming, SyncFailure, UnmetCondition, WaitInfo,
};
use document::{ContainerProbeHistory, DiagnosisInputs, Instance, Now, document};

use crate::{
    engine::{EngineHandle, PodReader, PodWorkerStatus, wait_class::WaitClass},
    probes,
};
use berth_metrics::{PodWaits, Registry};
use berth_ports::{Clock, ContainerPlacements, PodProgress};
use berth_server::ports::PodDiagnostics;
use berth_status::{StatusManager, lookup::last_exit};
use berth_types::{ContainerId, Pod, PodRef, PodUid, api};

/// Implements the endpoint from the snapshots of engine, status manager, and probe manager.
pub struct DiagnosticsProvider {
    /// Pods and their workers.
    pub pods: PodReader,
    /// Pod statuses.
    pub status: Arc<StatusManager>,
    /// Probe results.
    pub probes: Arc<probes::ProbeManagerHandle>,
    /// CPU, memory, and topology managers, for their refusals.
    pub placements: Arc<dyn ContainerPlacements>,
    /// Wall clock.
    pub clock: Arc<dyn Clock>,
}

impl PodDiagnostics for DiagnosticsProvider {
    fn why(&self, namespace: &str, name: &str) -> Option<Bytes> {
        let is_it = |id: &PodRef| &*id.namespace == namespace && &*id.name == name;
        let snapshot = self.pods.latest();
        let pod = snapshot.desired.iter().find(|pod| is_it(pod.id())).cloned();
        let standings = &snapshot.workers;
        // A desired pod takes precedence over one of the same name that is still terminating.
        let wanted = |standing: &&PodWorkerStatus| pod.as_ref().is_some_and(|pod| *pod.uid() == standing.id.uid);
        let leaving = || standings.iter().filter(|standing| is_it(&standing.id)).min_by_key(|s| s.life.is_finished());
        let standing = standings.iter().find(wanted).or_else(|| if pod.is_none() { leaving() } else { None });
        let id = standing.map(|standing| &standing.id).or_else(|| pod.as_ref().map(|pod| pod.id()))?;
        let status = self.status.status(&id.uid);
        let progress = standing.and_then(|standing| standing.progress.as_ref());
        let known = DiagnosisInputs {
            pod: pod.as_deref(),
            status: status.as_deref(),
            standing,
            step: standing.and_then(PodWorkerStatus::view),
            errors: progress.map(PodProgress::errors).unwrap_or_default(),
            timings: progress.map(PodProgress::timings).unwrap_or_default(),
            probes: status.as_deref().map(|status| self.histories(status)).unwrap_or_default(),
            refusal: self.placements.refusal(&id.uid),
        };
        let now = Now { wall: self.clock.now(), steady: Instant::now() };
        let mut body = serde_json::to_vec(&document(id, &known, now)).ok()?;
        body.push(b'\n');
        Some(body.into())
    }
}

impl DiagnosticsProvider {
    fn histories(&self, status: &api::PodStatus) -> Vec<ContainerProbeHistory> {
        let lists = [&status.init_container_statuses, &status.container_statuses];
        let all = lists.into_iter().flatten().flatten().flat_map(|container| {
            let before = last_exit(container).and_then(|exit| exit.container_id.as_deref());
            let of = |id: Option<&str>, instance| {
                let id = id.map(|id| id.split_once("://").map_or(id, |(_, id)| id)).unwrap_or_default();
                let histories = self.probes.history(&ContainerId::from(id)).into_iter();
                histories.map(move |history| ContainerProbeHistory {
                    container: container.name.clone(),
                    instance,
                    history,
                })
            };
            let current = container.container_id.as_deref();
            // A terminated container without a successor may appear as both the current and the previous instance.
            let before = before.filter(|before| current != Some(before));
            of(current, Instance::Current).chain(of(before, Instance::Previous))
        });
        all.collect()
    }
}

/// Registers `berth_pod_waiting_seconds`: per scrape, each pod's wait as reported in its diagnostics document.
pub fn register_wait_metrics(
    registry: &Registry,
    engine: &EngineHandle,
    status: Arc<StatusManager>,
    clock: Arc<dyn Clock>,
) {
    let reader = engine.pods.clone();
    PodWaits::register(registry, move || {
        let snapshot = reader.latest();
        let now = Now { wall: clock.now(), steady: Instant::now() };
        let pods: HashMap<&PodUid, &Arc<Pod>> = snapshot.desired.iter().map(|pod| (pod.uid(), pod)).collect();
        let of = |standing: &PodWorkerStatus| {
            let pod = pods.get(&standing.id.uid).map(|pod| &***pod);
            let waits = current_wait(standing.view().as_ref(), pod, status.status(&standing.id.uid).as_deref(), now)?;
            Some((WaitClass::of(&waits.stage)?.label(), Duration::try_from_secs_f64(waits.seconds).unwrap_or_default()))
        };
        snapshot.workers.iter().filter_map(of).collect()
    });
}
