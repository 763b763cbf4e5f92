//! Runtime manager: dependencies, settings, state, and the implementation of [`PodRuntime`].

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
    actuated_store::ActuatedStore,
    backoff::{BackoffLimits, CrashBackoff},
    config_preparation::Prepare,
    creation::CreationTracker,
    gc::PruneQueue,
    gc_rank::GcPolicy,
    pod_sync, resize,
};
use berth_cri::{CriError, RuntimeService};
use berth_metrics::RuntimeMetrics;
use berth_ports::{
    Clock, ContainerLogs, EventSink, ImageProvider, KillPod, ObjectSource, PodRuntime, ProbeManager, ResourceManager,
    SyncOutcome, SyncPod,
};
use berth_types::{ContainerId, Pod, PodUid, observation::ObservedPod};

/// Dependencies of the runtime manager.
pub struct RuntimeDeps {
    /// CRI runtime service.
    pub cri: Arc<dyn RuntimeService>,
    /// Pulls images.
    pub images: Arc<dyn ImageProvider>,
    /// Builds CRI configurations.
    pub prepare: Arc<dyn Prepare>,
    /// Recorder of events.
    pub events: Arc<dyn EventSink>,
    /// Provides probe results.
    pub probes: Arc<dyn ProbeManager>,
    /// Tunes containers and resizes pods.
    pub resources: Arc<dyn ResourceManager>,
    /// Resolves RuntimeClasses.
    pub objects: Arc<dyn ObjectSource>,
    /// Links and removes log files.
    pub logs: Arc<dyn ContainerLogs>,
    /// Checkpoint of the resources last applied.
    pub actuated: ActuatedStore,
    /// Wall clock.
    pub clock: Arc<dyn Clock>,
    /// Metrics of the runtime manager.
    pub metrics: RuntimeMetrics,
}

/// Settings of the runtime manager.
#[derive(Clone, Debug)]
pub struct RuntimeConfig {
    /// The runtime's name (`runtime_name` of the version call): the scheme of container IDs.
    pub name: Arc<str>,
    /// `runtimeRequestTimeout`: also how long a create with a lost answer is not repeated.
    pub request_timeout: Duration,
    /// `podLogsDir`: base of log paths that the runtime does not report.
    pub pod_logs_dir: PathBuf,
    /// Limits of the crash loop back-off.
    pub backoff: BackoffLimits,
    /// Limits of retained dead containers.
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
            backoff: BackoffLimits::default(),
            gc: GcPolicy::default(),
            gates: Gates::default(),
        }
    }
}

/// Executes pod syncs by CRI calls. Start its background work with [`RuntimeManager::run`], and garbage
/// collection with [`RuntimeManager::run_gc`].
pub struct RuntimeManager {
    pub(super) deps: RuntimeDeps,
    pub(super) config: RuntimeConfig,
    backoff: Mutex<CrashBackoff>,
    pub(super) creates: CreationTracker,
    pub(super) prunes: PruneQueue,
}

impl RuntimeManager {
    /// Creates the manager without calling the runtime.
    pub fn new(deps: RuntimeDeps, config: RuntimeConfig) -> Arc<Self> {
        Arc::new(Self {
            backoff: Mutex::new(CrashBackoff::new(config.backoff)),
            creates: CreationTracker::new(deps.cri.clone(), config.request_timeout),
            prunes: PruneQueue::new(),
            deps,
            config,
        })
    }

    /// Removes queued dead containers, and writes the checkpoint of applied resources, until stopped.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        tokio::join!(self.run_prunes(&stop), self.deps.actuated.run(&stop));
    }

    /// The crash loop back-offs; hold the guard for one lookup only.
    pub(super) fn backoff(&self) -> MutexGuard<'_, CrashBackoff> {
        self.backoff.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl PodRuntime for RuntimeManager {
    async fn sync_pod(&self, request: SyncPod) -> SyncOutcome {
        pod_sync::pass(self, &request).await
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
        // All other state is not persisted, and removed pod by pod.
        self.deps.actuated.retain(pods);
    }

    fn name(&self) -> Arc<str> {
        self.config.name.clone()
    }
}

/// The runtime's error message without the gRPC prefix, as waiting messages show it.
pub(super) fn bare(error: &CriError) -> String {
    match error {
        CriError::Rpc { message, .. } => message.clone(),
        other => other.to_string(),
    }
}
