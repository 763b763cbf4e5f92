//! Players for roles that have nothing to play without an API server, or are not built yet.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use async_trait::async_trait;

use crate::{
    engine::ports::{
        Event, EventSink, MirrorFate, MirrorPods, ObjectError, ObjectSource, ProbeManager, ProbeResult, ProbeResults,
        PullSecret,
    },
    pod::{ContainerId, Pod, PodFullName, PodUid, api},
};

/// There is no API server: references fail with the reference's words, no service exists.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoObjects;

#[async_trait]
impl ObjectSource for NoObjects {
    async fn config_map(&self, namespace: &str, name: &str) -> Result<Arc<BTreeMap<String, String>>, ObjectError> {
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        Err(ObjectError::NoClient { kind: "configMap", namespace, name })
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<BTreeMap<String, Vec<u8>>>, ObjectError> {
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        Err(ObjectError::NoClient { kind: "secret", namespace, name })
    }

    fn services(&self, _namespace: &str) -> Option<Vec<Arc<api::Service>>> {
        Some(Vec::new())
    }

    async fn runtime_handler(&self, _class: Option<&str>) -> Result<String, ObjectError> {
        Ok(String::new())
    }

    async fn pull_secrets(&self, pod: &Pod) -> (Vec<PullSecret>, Vec<String>) {
        let named = pod.spec().image_pull_secrets.iter().flatten().map(|s| s.name.clone());
        (Vec::new(), named.filter(|name| !name.is_empty()).collect())
    }
}

/// There is no API server: static pods have no mirrors.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoMirrors;

impl MirrorPods for NoMirrors {
    fn want(&self, _pod: &Arc<Pod>) {}

    fn keep(&self, _names: HashMap<PodFullName, MirrorFate>) {}
}

/// Probes are not run yet: every probe counts as passed, and each pod that has one is told so.
pub struct ProbesAbsent {
    events: Arc<dyn EventSink>,
}

impl ProbesAbsent {
    /// `events` is where the warnings go.
    pub fn new(events: Arc<dyn EventSink>) -> Self {
        Self { events }
    }
}

impl ProbeManager for ProbesAbsent {
    fn add(&self, pod: &Arc<Pod>) {
        let has = |c: &&api::Container| {
            c.liveness_probe.is_some() || c.readiness_probe.is_some() || c.startup_probe.is_some()
        };
        let probed: Vec<&str> =
            pod.containers().iter().chain(pod.init_containers()).filter(has).map(|c| c.name.as_str()).collect();
        if !probed.is_empty() {
            let text = format!("probes are not yet effective and count as passed: containers {}", probed.join(", "));
            self.events.record(Event::warning(pod.id(), "ProbesNotEffective", text));
        }
    }

    fn stop_liveness(&self, _pod: &PodUid) {}

    fn remove(&self, _pod: &PodUid) {}

    fn results(&self, _container: &ContainerId) -> ProbeResults {
        let passed = Some(ProbeResult::Success);
        ProbeResults { startup: passed, readiness: passed, liveness: passed }
    }
}
