//! Server ports for container logs and running pods, from the engine, log reader, and pod store.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use serde_json::{Value, json};
use tracing::debug;

use crate::{
    engine::PodReader,
    logs::{self, LogOptions, LogReader, LogStreams},
};
use berth_ports::{Clock, PodObserver};
use berth_server::ports::{ContainerLogs, LogError, LogQuery, LogSink, LogSource, LogStream, RunningPods};
use berth_status::StatusManager;
use berth_types::{
    ContainerId,
    observation::{ContainerState, ObservedPod},
};

/// Logs of the pods of the engine.
pub struct PodLogs {
    /// Desired pods.
    pub pods: PodReader,
    /// Pod statuses.
    pub status: Arc<StatusManager>,
    /// Log reader.
    pub reader: LogReader,
    /// Observed state of the pods; a follower of a log learns from it that the container exited.
    pub observer: Arc<dyn PodObserver>,
    /// Wall clock, for relative start times.
    pub clock: Arc<dyn Clock>,
    /// Name of the runtime, the scheme of container IDs in errors.
    pub runtime: Arc<str>,
}

#[async_trait]
impl ContainerLogs for PodLogs {
    async fn find(&self, namespace: &str, pod: &str, container: &str) -> Result<LogSource, LogError> {
        let pods = self.pods.desired();
        let Some(found) = pods.iter().find(|p| p.name() == pod && p.namespace() == namespace) else {
            return Err(LogError::NotFound(format!("pod {pod:?} does not exist")));
        };
        let regular = found.containers().iter().chain(found.init_containers()).map(|c| c.name.as_str());
        let mut all = regular.chain(found.ephemeral_containers().iter().map(|c| c.name.as_str()));
        if !all.any(|name| name == container) {
            return Err(LogError::NotFound(format!("container {container:?} not found in pod {pod:?}")));
        }
        Ok(LogSource { pod: found.clone(), status: self.status.status(found.uid()), instance: None })
    }

    fn instance(&self, source: &LogSource, container: &str, is_previous: bool) -> Result<LogSource, String> {
        let unset = berth_types::api::PodStatus::default();
        let status = source.status.as_deref().or(source.pod.status.as_deref()).unwrap_or(&unset);
        let chosen = logs::instance(source.pod.name(), container, status, is_previous).map_err(|e| e.to_string())?;
        Ok(LogSource { instance: Some(chosen), ..source.clone() })
    }

    async fn read(&self, source: &LogSource, query: &LogQuery, out: &mut LogSink<'_>) -> Result<(), String> {
        let Some(id) = &source.instance else { return Err("no container instance selected".to_owned()) };
        let options = LogOptions {
            tail: query.tail,
            since: logs::since(self.clock.now(), query.since_seconds, query.since_time),
            limit_bytes: query.limit_bytes,
            timestamps: query.timestamps,
            streams: match query.stream {
                None | Some(LogStream::All) => LogStreams::All,
                Some(LogStream::Stdout) => LogStreams::Only(logs::LineStream::Stdout),
                Some(LogStream::Stderr) => LogStreams::Only(logs::LineStream::Stderr),
            },
            follow: query.follow,
        };
        let path = self.reader.path_of(id).await.map_err(|err| {
            debug!(containerID = %id, %err, "Failed to find container log");
            format!("unable to retrieve container logs for {}://{id}", self.runtime)
        })?;
        let (observer, pod) = (self.observer.clone(), source.pod.uid().clone());
        let observed_running = move |id: &ContainerId| is_running(&*observer.known_pod(&pod)?, id);
        let reader = self.reader.clone().with_observed_state(Arc::new(observed_running));
        reader.read(&path, id, &options, out).await.map_err(|err| err.to_string())
    }
}

/// True if the container runs; `None` if it was not observed or its state is unknown.
fn is_running(seen: &ObservedPod, id: &ContainerId) -> Option<bool> {
    match seen.containers.iter().find(|container| container.id == *id)?.state {
        ContainerState::Running => Some(true),
        ContainerState::Exited => Some(false),
        _ => None,
    }
}

/// Running pods from the pod store, as current as its last event.
pub struct RuntimePodList {
    /// Pod store.
    pub observer: Arc<dyn PodObserver>,
}

#[async_trait]
impl RunningPods for RuntimePodList {
    async fn list(&self) -> Result<Bytes, String> {
        let Some(known) = self.observer.known() else {
            return Err("pods have not been listed from the runtime yet".to_owned());
        };
        let mut items: Vec<(String, Value)> = Vec::new();
        for pod in known.pods.values() {
            let running = |c: &&berth_types::observation::ObservedContainer| c.state == ContainerState::Running;
            let containers: Vec<Value> = pod
                .containers
                .iter()
                .filter(running)
                .map(|c| json!({"name": &*c.name, "image": c.image, "resources": {}}))
                .collect();
            if containers.is_empty() && !pod.is_alive() {
                continue;
            }
            let metadata = json!({"name": &*pod.id.name, "namespace": &*pod.id.namespace, "uid": pod.id.uid.as_str()});
            let containers = if containers.is_empty() { Value::Null } else { containers.into() };
            let item = json!({"metadata": metadata, "spec": {"containers": containers}, "status": {}});
            items.push((pod.id.object_name(), item));
        }
        items.sort_by(|a, b| a.0.cmp(&b.0));
        let items: Vec<Value> = items.into_iter().map(|(_, item)| item).collect();
        let items = if items.is_empty() { Value::Null } else { items.into() };
        let list = json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items});
        let mut page = serde_json::to_vec(&list).map_err(|e| e.to_string())?;
        page.push(b'\n');
        Ok(page.into())
    }
}
