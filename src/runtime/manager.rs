//! The runtime manager: what it needs, what it remembers, and its doors.

use std::{
    collections::HashSet,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;

use super::{
    actions::Gates,
    actuated::ActuatedStore,
    backoff::{CrashBackoff, Limits},
    creates::Creates,
    execute,
    gc::PruneQueue,
    gc_rank::GcPolicy,
    prepare::Prepare,
    resize,
};
use berth_cri::{CriError, RuntimeService};
use berth_metrics::RuntimeMetrics;
use berth_ports::{
    Clock, ContainerLogs, EventSink, ImageProvider, KillPod, ObjectSource, PodRuntime, ProbeManager, ResourceManager,
    SyncOutcome, SyncPod,
};
use berth_types::{ContainerId, Pod, PodUid, observed::ObservedPod};

/// The players the runtime room calls.
pub struct RuntimeDeps {
    /// The runtime.
    pub cri: Arc<dyn RuntimeService>,
    /// Makes images usable.
    pub images: Arc<dyn ImageProvider>,
    /// Builds configurations.
    pub prepare: Arc<dyn Prepare>,
    /// Takes events.
    pub events: Arc<dyn EventSink>,
    /// Tells what probes said.
    pub probes: Arc<dyn ProbeManager>,
    /// Tunes containers, resizes pods.
    pub resources: Arc<dyn ResourceManager>,
    /// Knows runtime classes.
    pub objects: Arc<dyn ObjectSource>,
    /// Links and removes log files.
    pub logs: Arc<dyn ContainerLogs>,
    /// Resources last applied.
    pub actuated: ActuatedStore,
    /// Wall time.
    pub clock: Arc<dyn Clock>,
    /// What is counted.
    pub metrics: RuntimeMetrics,
}

/// Settings of the runtime room.
#[derive(Clone, Debug)]
pub struct RuntimeConfig {
    /// How the runtime calls itself (`runtime_name` of the version call): the scheme of container ids.
    pub name: Arc<str>,
    /// `runtimeRequestTimeout`: also how long a create whose outcome is unknown is not repeated.
    pub request_timeout: Duration,
    /// `podLogsDir`; log paths that the runtime does not report are built from it.
    pub pod_logs_dir: PathBuf,
    /// Crash back-off.
    pub backoff: Limits,
    /// Which dead containers are kept.
    pub gc: GcPolicy,
    /// Feature gates.
    pub gates: Gates,
}

impl RuntimeConfig {
    /// The defaults of the configuration file, for a runtime of that name.
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        Self {
            name: name.into(),
            request_timeout: Duration::from_secs(120),
            pod_logs_dir: "/var/log/pods".into(),
            backoff: Limits::default(),
            gc: GcPolicy::default(),
            gates: Gates::default(),
        }
    }
}

/// Carries out plans by CRI calls. Start its background work with [`RuntimeManager::run`], and
/// garbage collection with [`RuntimeManager::run_gc`].
pub struct RuntimeManager {
    pub(super) deps: RuntimeDeps,
    pub(super) config: RuntimeConfig,
    backoff: Mutex<CrashBackoff>,
    pub(super) creates: Creates,
    pub(super) prunes: PruneQueue,
}

impl RuntimeManager {
    /// Puts it together; calls nobody yet.
    pub fn new(deps: RuntimeDeps, config: RuntimeConfig) -> Arc<Self> {
        Arc::new(Self {
            backoff: Mutex::new(CrashBackoff::new(config.backoff)),
            creates: Creates::new(deps.cri.clone(), config.request_timeout),
            prunes: PruneQueue::new(),
            deps,
            config,
        })
    }

    /// Removes dead containers as they are queued, and writes the record of actuated resources,
    /// until stopped.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        tokio::join!(self.run_prunes(&stop), self.deps.actuated.run(&stop));
    }

    /// The crash back-off; the guard is held for one question only.
    pub(super) fn backoff(&self) -> MutexGuard<'_, CrashBackoff> {
        self.backoff.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl PodRuntime for RuntimeManager {
    async fn sync_pod(&self, request: SyncPod) -> SyncOutcome {
        execute::pass(self, &request).await
    }

    async fn kill_pod(&self, request: KillPod) -> Result<(), String> {
        self.kill_whole_pod(request).await
    }

    fn prune(&self, observed: &Arc<ObservedPod>, container: Option<(&str, &ContainerId)>, all: bool) {
        self.queue_dead(observed, container, all);
    }

    async fn remove_pod(&self, observed: &Arc<ObservedPod>) -> Result<(), String> {
        self.remove_observed(observed).await
    }

    fn resize_in_progress(&self, pod: &Pod, observed: &ObservedPod) -> bool {
        resize::is_in_progress(pod, observed, &self.config.gates, self.deps.actuated.get(pod.uid()).as_ref())
    }

    fn forget(&self, pod: &PodUid) {
        self.backoff().forget(pod);
        self.creates.forget(pod);
        self.deps.actuated.remove(pod);
        self.deps.images.forget(pod);
    }

    fn retain(&self, pods: &HashSet<PodUid>) {
        // All else is of this life, and forgotten pod by pod.
        self.deps.actuated.retain(pods);
    }

    fn name(&self) -> Arc<str> {
        self.config.name.clone()
    }
}

/// The runtime's own words, as waiting messages show them (without the gRPC frame).
pub(super) fn bare(error: &CriError) -> String {
    match error {
        CriError::Rpc { message, .. } => message.clone(),
        other => other.to_string(),
    }
}
