//! Tells why a pod is as it is, and how long pods wait for what (`/debug/why/{namespace}/{pod}`,
//! `berth_pod_waiting_seconds`). Reads snapshots only, so that it answers when nothing else does.

mod document;

use std::sync::Arc;

use bytes::Bytes;
use tokio::{sync::watch, time::Instant};

pub use document::{Condition, Container, Exit, Failed, Passed, Probe, ProbeRun, Waits, Why};
use document::{Known, Now, document};

use crate::{
    engine::{EngineHandle, Standing, Standings, ports::Clock, waits::Wait},
    metrics::{PodWaits, Registry},
    pod::{ContainerId, Pod, PodRef, api},
    probes,
    server::ports::Explains,
    status::StatusManager,
};

/// The snapshots that are read.
pub(super) struct PodStories {
    pub(super) pods: watch::Receiver<Arc<Vec<Arc<Pod>>>>,
    pub(super) standings: Standings,
    pub(super) status: Arc<StatusManager>,
    pub(super) probes: Arc<probes::Manager>,
    pub(super) clock: Arc<dyn Clock>,
}

impl Explains for PodStories {
    fn why(&self, namespace: &str, name: &str) -> Option<Bytes> {
        let is_it = |id: &PodRef| &*id.namespace == namespace && &*id.name == name;
        let pod = self.pods.borrow().iter().find(|pod| is_it(pod.id())).cloned();
        let standings = self.standings.borrow().clone();
        // Whom somebody wants comes first, then whoever is still on its way out.
        let wanted = |standing: &&Standing| pod.as_ref().is_some_and(|pod| *pod.uid() == standing.id.uid);
        let leaving = || standings.iter().filter(|standing| is_it(&standing.id)).min_by_key(|s| s.life.is_finished());
        let standing = standings.iter().find(wanted).or_else(|| if pod.is_none() { leaving() } else { None });
        let id = standing.map(|standing| &standing.id).or_else(|| pod.as_ref().map(|pod| pod.id()))?;
        let status = self.status.status(&id.uid);
        let stage = standing.and_then(|standing| standing.stage.as_ref());
        let known = Known {
            pod: pod.as_deref(),
            status: status.as_deref(),
            standing,
            stage: stage.map(|stage| stage.view()),
            errors: stage.map(|stage| stage.errors()).unwrap_or_default(),
            passed: stage.map(|stage| stage.passed()).unwrap_or_default(),
            probes: status.as_deref().map(|status| self.histories(status)).unwrap_or_default(),
        };
        let now = Now { wall: self.clock.now(), steady: Instant::now() };
        let mut body = serde_json::to_vec(&document(id, &known, now)).ok()?;
        body.push(b'\n');
        Some(body.into())
    }
}

impl PodStories {
    fn histories(&self, status: &api::PodStatus) -> Vec<(String, probes::History)> {
        let lists = [&status.init_container_statuses, &status.container_statuses];
        let of = |container: &api::ContainerStatus| {
            let id = container.container_id.as_deref()?;
            let id = ContainerId::from(id.split_once("://").map_or(id, |(_, id)| id));
            let told = self.probes.history(&id).into_iter();
            Some(told.map(|history| (container.name.clone(), history)).collect::<Vec<_>>())
        };
        lists.into_iter().flatten().flatten().filter_map(of).flatten().collect()
    }
}

/// Scrapes tell for how long some pod has been waiting for what.
pub(super) fn count_waits(registry: &Registry, engine: &EngineHandle) {
    let standings = engine.standings.clone();
    PodWaits::register(registry, move || {
        let standings = standings.borrow().clone();
        let stages = standings.iter().filter_map(|standing| standing.stage.as_ref()).map(|stage| stage.view());
        stages.filter_map(|stage| Some((Wait::of(&stage.name)?.label(), stage.since.elapsed()))).collect()
    });
}
