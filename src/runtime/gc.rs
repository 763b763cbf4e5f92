//! Container garbage collection: removes dead containers and sandboxes after exits and every minute.
//!
//! Implements spec 03a §11, 02a §9.8.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use tokio::{sync::mpsc, time::Instant};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error};

use super::{
    gc_rank::{self, ListedContainer, ListedSandbox},
    manager::RuntimeManager,
    pod_sync::Logs,
};
use berth_otel::Scope;
use berth_ports::{ContainerLogFile, EventRecord, PodStateProvider, RemovalPredicate};
use berth_proto::cri;
use berth_types::{
    ContainerId, PodRef, PodUid, SandboxId,
    observation::{ContainerState, ObservedPod},
};

/// Period of garbage collection.
const PERIOD: Duration = Duration::from_secs(60);
/// Polling interval, before the first round, for all pod sources to be ready.
const SOURCES_POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Capacity of the removal queue; garbage collection removes what did not fit.
const QUEUE: usize = 50;

/// Queue of dead containers to remove.
pub(super) struct PruneQueue {
    sender: mpsc::Sender<ContainerLogFile>,
    receiver: Mutex<Option<mpsc::Receiver<ContainerLogFile>>>,
}

impl PruneQueue {
    pub(super) fn new() -> Self {
        let (sender, receiver) = mpsc::channel(QUEUE);
        Self { sender, receiver: Mutex::new(Some(receiver)) }
    }
}

/// Whether dead containers of terminated pods that are not deleted are removed as well.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GcMode {
    /// Periodic round: they are kept.
    Normal,
    /// Under disk pressure: they are removed.
    EvictTerminated,
}

impl RuntimeManager {
    /// Queues the removal of dead instances beyond those to keep.
    pub(super) fn queue_dead(&self, observed: &ObservedPod, container: Option<(&str, &ContainerId)>, all: bool) {
        let keep = usize::try_from(self.config.gc.max_per_container).unwrap_or(usize::MAX).max(1);
        for id in gc_rank::dead_instances(observed, container.map(|(name, _)| name), keep, all) {
            let Some(instance) = observed.containers.iter().find(|c| c.id == id) else { continue };
            let file = ContainerLogFile {
                pod: observed.id.clone(),
                container: instance.name.clone(),
                id,
                path: instance.log_path.clone().into(),
            };
            if self.prunes.sender.try_send(file).is_err() {
                debug!(podUID = %observed.id.uid, "Queue of dead containers is full, leaving removal to garbage collection");
            }
        }
    }

    /// Removes queued containers one at a time.
    pub(super) async fn run_prunes(&self, stop: &CancellationToken) {
        let receiver = self.prunes.receiver.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut receiver) = receiver else { return };
        loop {
            let next = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                next = receiver.recv() => next,
            };
            let Some(file) = next else { return };
            let id = file.id.clone();
            let removed = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                removed = self.remove_instance(file, Logs::Remove) => removed,
            };
            if let Err(err) = removed {
                error!(containerID = %id, err, "Failed to remove dead container");
            }
        }
    }

    /// Runs garbage collection once the pod sources are ready, or after one period, and then every
    /// minute until stopped. The first round removes what a killed agent left behind.
    pub async fn run_gc(self: Arc<Self>, pod_states: Arc<dyn PodStateProvider>, stop: CancellationToken) {
        let mut failing = false;
        let mut first = Some(Instant::now() + PERIOD);
        loop {
            let pause = if first.is_some() { SOURCES_POLL_INTERVAL } else { PERIOD };
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
            if first.is_some_and(|latest| Instant::now() < latest && !pod_states.sources_ready()) {
                continue;
            }
            first = None;
            let collected = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                collected = self.collect_garbage(&pod_states, GcMode::Normal) => collected,
            };
            match collected {
                Ok(()) => failing = false,
                Err(err) => {
                    error!(err, "Container garbage collection failed");
                    if !std::mem::replace(&mut failing, true) {
                        self.deps.events.record(EventRecord::node_warning("ContainerGCFailed", err));
                    }
                }
            }
        }
    }

    /// Runs one round: containers, sandboxes, log directories, dangling links.
    ///
    /// # Errors
    /// The joined texts of failed lists and removals.
    pub async fn collect_garbage(&self, pod_states: &Arc<dyn PodStateProvider>, mode: GcMode) -> Result<(), String> {
        let span = berth_otel::root_span(Scope::Kuberuntime, "Containers/GarbageCollect", Vec::new);
        span.run(self.collect_all(pod_states, mode)).await
    }

    async fn collect_all(&self, pod_states: &Arc<dyn PodStateProvider>, mode: GcMode) -> Result<(), String> {
        let mut failures = Vec::new();
        self.backoff().purge(self.deps.clock.now());
        let ready = pod_states.sources_ready();
        let may_go = |pod: &PodUid| {
            ready
                && (pod_states.should_pod_content_be_removed(pod)
                    || (mode == GcMode::EvictTerminated && pod_states.is_terminated(pod)))
        };
        let raw = self.deps.cri.list_containers(None).await.map_err(|e| e.to_string())?;
        let owners: HashMap<ContainerId, PodRef> =
            raw.iter().filter_map(|c| Some((c.id.as_str().into(), owner(&c.labels)?))).collect();
        let listed: Vec<ListedContainer> = raw.iter().filter_map(listed_container).collect();
        let doomed = gc_rank::containers(&listed, self.config.gc, self.deps.clock.now(), may_go);
        let mut gone = HashSet::new();
        for container in doomed {
            match self.collect_container(container, owners.get(&container.id)).await {
                Ok(()) => {
                    gone.insert(container.id.clone());
                }
                Err(err) => failures.push(err),
            }
        }
        let left: Vec<ListedContainer> = listed.into_iter().filter(|c| !gone.contains(&c.id)).collect();
        if let Err(err) = self.collect_sandboxes(&left, &may_go).await {
            failures.push(err);
        }
        self.collect_logs(pod_states, ready, left).await;
        match failures.as_slice() {
            [] => Ok(()),
            [one] => Err(one.clone()),
            many => Err(format!("[{}]", many.join(", "))),
        }
    }

    async fn collect_container(&self, container: &ListedContainer, pod: Option<&PodRef>) -> Result<(), String> {
        let Some(pod) = pod else { return Ok(()) };
        let failed = |e: &dyn std::fmt::Display| format!("failed to remove container {}: {e}", container.id);
        if container.state == ContainerState::Unknown {
            debug!(containerID = %container.id, "Container is in unknown state, try killing it before removal");
            let minimum = super::grace::MINIMUM;
            self.deps.cri.stop_container(container.id.as_str(), minimum).await.map_err(|e| failed(&e))?;
        }
        let path = match self.deps.cri.container_status(container.id.as_str()).await {
            Ok(status) => status.log_path.into(),
            Err(err) if err.is_not_found() => return Ok(()),
            Err(err) => return Err(failed(&err)),
        };
        let (name, id) = (container.name.as_str().into(), container.id.clone());
        let file = ContainerLogFile { pod: pod.clone(), container: name, id, path };
        self.remove_instance(file, Logs::Remove).await.map_err(|e| failed(&e))
    }

    async fn collect_sandboxes(
        &self,
        containers: &[ListedContainer],
        may_go: &impl Fn(&PodUid) -> bool,
    ) -> Result<(), String> {
        let raw = self.deps.cri.list_pod_sandbox(None).await.map_err(|e| e.to_string())?;
        let listed: Vec<ListedSandbox> = raw.iter().filter_map(listed_sandbox).collect();
        let mut failures = Vec::new();
        for sandbox in gc_rank::sandboxes(&listed, containers, may_go) {
            let id = sandbox.id.as_str();
            let removed = match self.deps.cri.stop_pod_sandbox(id).await {
                Ok(()) => self.deps.cri.remove_pod_sandbox(id).await,
                Err(err) => Err(err),
            };
            if let Err(err) = removed {
                failures.push(format!("failed to remove sandbox {id}: {err}"));
            }
        }
        if failures.is_empty() { Ok(()) } else { Err(failures.join(", ")) }
    }

    async fn collect_logs(
        &self,
        pod_states: &Arc<dyn PodStateProvider>,
        ready: bool,
        containers: Vec<ListedContainer>,
    ) {
        if ready {
            let pod_states = pod_states.clone();
            let may_go: RemovalPredicate = Arc::new(move |pod| pod_states.should_pod_content_be_removed(pod));
            self.deps.logs.remove_directories(may_go).await;
        }
        let alive = containers.into_iter().filter(|c| c.state != ContainerState::Exited).map(|c| c.id).collect();
        self.deps.logs.remove_dangling_links(alive).await;
    }
}

/// The pod an object belongs to; `None` for objects that this agent did not create.
fn owner(labels: &HashMap<String, String>) -> Option<PodRef> {
    let label = |key: &str| labels.get(key).filter(|text| !text.is_empty());
    Some(PodRef {
        uid: label("io.kubernetes.pod.uid")?.as_str().into(),
        name: label("io.kubernetes.pod.name")?.as_str().into(),
        namespace: label("io.kubernetes.pod.namespace")?.as_str().into(),
    })
}

fn listed_container(raw: &cri::Container) -> Option<ListedContainer> {
    let state = match raw.state() {
        cri::ContainerState::ContainerCreated => ContainerState::Created,
        cri::ContainerState::ContainerRunning => ContainerState::Running,
        cri::ContainerState::ContainerExited => ContainerState::Exited,
        cri::ContainerState::ContainerUnknown => ContainerState::Unknown,
    };
    Some(ListedContainer {
        id: raw.id.as_str().into(),
        pod: owner(&raw.labels)?.uid,
        name: raw.metadata.as_ref()?.name.clone(),
        attempt: raw.metadata.as_ref()?.attempt,
        sandbox: SandboxId::from(raw.pod_sandbox_id.as_str()),
        state,
        created_at: nanoseconds(raw.created_at),
    })
}

fn listed_sandbox(raw: &cri::PodSandbox) -> Option<ListedSandbox> {
    Some(ListedSandbox {
        id: raw.id.as_str().into(),
        pod: owner(&raw.labels)?.uid,
        ready: raw.state() == cri::PodSandboxState::SandboxReady,
        attempt: raw.metadata.as_ref().map_or(0, |m| m.attempt),
        created_at: nanoseconds(raw.created_at),
    })
}

fn nanoseconds(since_epoch: i64) -> Timestamp {
    Timestamp::from_nanosecond(i128::from(since_epoch)).unwrap_or(Timestamp::UNIX_EPOCH)
}
