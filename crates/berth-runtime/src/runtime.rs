//! The embedded runtime: index of sandboxes and containers, and state shared by the CRI services.
//!
//! Work continues after its caller disconnects; an identical request joins it. Implements spec 09 §9.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError, RwLock},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tokio::{
    sync::{Semaphore, watch},
    task::spawn_blocking,
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    actor::SandboxHandle,
    config::EmbeddedConfig,
    cri_conversions,
    errors::{ErrorKind, RuntimeError, RuntimeResult},
    events::EventBroadcaster,
    ids,
    log_totals::LogTotals,
    name_reservations::NameReservations,
    ports::Ports,
    runtime_context::RuntimeContext,
    sandbox::Sandbox,
    stats::{Meter, layer_usage::LayerUsageCache},
    store::{self, Layout},
    streams::PendingStreams,
};
use berth_metrics::{EmbeddedMetrics, EmbeddedObjects, Registry};
use berth_proto::cri;
use berth_shim::log_tally::LogTally;

/// Maximum number of sandboxes that are created in parallel.
const SANDBOXES_AT_ONCE: usize = 8;
/// Maximum number of containers that are started in parallel.
const STARTS_AT_ONCE: usize = 16;
/// Timeout of file operations.
pub const FILES_LIMIT: Duration = Duration::from_secs(30);

/// The embedded runtime.
pub struct Runtime {
    /// Context that all sandboxes share.
    pub shell: Arc<RuntimeContext>,
    /// Ports to the host.
    pub ports: Ports,
    /// Facts about the host.
    pub host: HostFacts,
    index: RwLock<Index>,
    /// Reserved sandbox names, with configuration and runtime handler of the request.
    pub sandbox_names: NameReservations<(Arc<cri::PodSandboxConfig>, String)>,
    /// Reserved container names, with configuration and sandbox id of the request.
    pub container_names: NameReservations<(Arc<cri::ContainerConfig>, String)>,
    /// Last CPU usage samples, for usage rates.
    pub meter: Meter,
    /// Cached usage of writable layers.
    pub layers: Arc<LayerUsageCache>,
    /// Semaphore that limits parallel sandbox creations.
    pub creations: Semaphore,
    /// Semaphore that limits parallel container starts.
    pub starts: Semaphore,
    /// Prepared streams that wait for their client.
    pub streams: PendingStreams,
    ready: watch::Sender<bool>,
    _lock: store::Lock,
}

/// Facts about the host.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostFacts {
    /// Unique id of the current boot.
    pub boot_id: Arc<str>,
    /// Host name of the node.
    pub hostname: String,
    /// Cgroup driver that `RuntimeConfig` reports.
    pub driver: cri::CgroupDriver,
    /// Whether recursive read-only mounts are supported.
    pub has_recursive_read_only: bool,
    /// Whether pods can have a user namespace.
    pub has_user_namespaces: bool,
}

#[derive(Default)]
struct Index {
    pods: BTreeMap<String, SandboxHandle>,
    /// Sandbox id of each container.
    containers: BTreeMap<String, String>,
}

impl Runtime {
    /// Takes the lock and creates the directories; starts nothing.
    ///
    /// # Errors
    /// Another daemon owns the lock, or the directories are unusable.
    pub fn open(
        config: EmbeddedConfig,
        ports: Ports,
        host: HostFacts,
        (tasks, stop): (TaskTracker, CancellationToken),
    ) -> RuntimeResult<Arc<Self>> {
        let lock = store::open(&Layout { root: config.root.clone(), state: config.state.clone() })?;
        // Metrics that nobody collects.
        let metrics = EmbeddedMetrics::new(&Registry::new());
        Ok(Self::with_lock(config, ports, host, (tasks, stop), lock, metrics))
    }

    /// Like [`Self::open`], with an acquired lock and metrics.
    pub fn with_lock(
        config: EmbeddedConfig,
        ports: Ports,
        host: HostFacts,
        (tasks, stop): (TaskTracker, CancellationToken),
        lock: store::Lock,
        metrics: EmbeddedMetrics,
    ) -> Arc<Self> {
        let layout = Layout { root: config.root.clone(), state: config.state.clone() };
        let shell = RuntimeContext {
            config,
            layout,
            hub: EventBroadcaster::default(),
            metrics,
            logs: LogTotals::default(),
            groups: ports.groups.clone(),
            shims: ports.shims.clone(),
            tasks,
            stop,
        };
        Arc::new(Self {
            shell: Arc::new(shell),
            ports,
            host,
            index: RwLock::default(),
            sandbox_names: NameReservations::default(),
            container_names: NameReservations::default(),
            meter: Meter::default(),
            layers: Arc::default(),
            creations: Semaphore::new(SANDBOXES_AT_ONCE),
            starts: Semaphore::new(STARTS_AT_ONCE),
            streams: PendingStreams::default(),
            ready: watch::channel(false).0,
            _lock: lock,
        })
    }

    /// Marks the recovery as complete: calls no longer wait.
    pub fn set_ready(&self) {
        self.ready.send_replace(true);
    }

    /// Whether the recovery is complete.
    pub fn is_ready(&self) -> bool {
        *self.ready.borrow()
    }

    /// Waits until the recovery is complete.
    pub async fn wait_until_ready(&self) {
        // The sender lives as long as `self`.
        let _ = self.ready.subscribe().wait_for(|ready| *ready).await;
    }

    /// Starts the actor of a sandbox, and indexes it with its containers.
    pub fn adopt(&self, sandbox: Sandbox) -> SandboxHandle {
        let id = sandbox.id().to_owned();
        let containers: Vec<_> = sandbox.containers.keys().cloned().collect();
        let pod = SandboxHandle::start(sandbox, self.shell.clone());
        let mut index = self.index.write().unwrap_or_else(PoisonError::into_inner);
        index.containers.extend(containers.into_iter().map(|container| (container, id.clone())));
        index.pods.insert(id, pod.clone());
        pod
    }

    /// Adds a container to the index.
    pub fn note_container(&self, container: &str, sandbox: &str) {
        let mut index = self.index.write().unwrap_or_else(PoisonError::into_inner);
        index.containers.insert(container.to_owned(), sandbox.to_owned());
    }

    /// Removes a container from the index and the caches.
    pub fn forget_container(&self, container: &str) {
        self.meter.remove(container);
        self.layers.forget(container);
        self.index.write().unwrap_or_else(PoisonError::into_inner).containers.remove(container);
    }

    /// Removes a sandbox and its containers from the index.
    pub fn forget_pod(&self, id: &str) {
        self.meter.remove(id);
        let mut index = self.index.write().unwrap_or_else(PoisonError::into_inner);
        index.pods.remove(id);
        index.containers.retain(|_, sandbox| sandbox != id);
    }

    /// The sandbox with this id or unique id prefix.
    ///
    /// # Errors
    /// There is none, or the prefix is ambiguous.
    pub fn pod(&self, id: &str) -> RuntimeResult<SandboxHandle> {
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        let found = ids::find(&index.pods, id)?.filter(|pod| cri_conversions::is_listed(&pod.now()));
        found.cloned().ok_or_else(|| RuntimeError::no_sandbox(id))
    }

    /// The sandbox and the full id of the container with this id or unique id prefix.
    ///
    /// # Errors
    /// There is none, or the prefix is ambiguous.
    pub fn container(&self, id: &str) -> RuntimeResult<(SandboxHandle, String)> {
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        let none = || RuntimeError::no_container(id);
        let sandbox = ids::find(&index.containers, id)?.ok_or_else(none)?;
        let pod = index.pods.get(sandbox).ok_or_else(none)?;
        let now = pod.now();
        let whole = now.containers.keys().find(|whole| whole.starts_with(id)).ok_or_else(none)?;
        Ok((pod.clone(), whole.clone()))
    }

    /// All sandboxes.
    pub fn pods(&self) -> Vec<SandboxHandle> {
        self.index.read().unwrap_or_else(PoisonError::into_inner).pods.values().cloned().collect()
    }

    /// Log counters of all containers. Blocking: reads a file on a tmpfs per pod.
    pub fn log_totals(&self) -> LogTally {
        let pods: Vec<_> = self.pods().iter().map(SandboxHandle::now).collect();
        self.shell.logs.sum(&self.shell.layout, pods.iter().map(|sandbox| sandbox.id()))
    }

    /// Number of listed sandboxes and their containers, by state.
    pub fn object_counts(&self) -> EmbeddedObjects {
        let mut pods = [("ready", 0), ("notready", 0)];
        let mut containers = [("created", 0), ("running", 0), ("exited", 0)];
        for sandbox in self.pods().iter().map(|pod| pod.now()).filter(|sandbox| cri_conversions::is_listed(sandbox)) {
            pods[usize::from(!sandbox.is_ready())].1 += 1;
            for container in sandbox.containers.values() {
                let place = match container.state() {
                    cri::ContainerState::ContainerCreated => 0,
                    cri::ContainerState::ContainerRunning => 1,
                    cri::ContainerState::ContainerExited | cri::ContainerState::ContainerUnknown => 2,
                };
                containers[place].1 += 1;
            }
        }
        EmbeddedObjects { pods: pods.to_vec(), containers: containers.to_vec(), ..EmbeddedObjects::default() }
    }

    /// Runs work in its own task, so that it completes even if the caller disconnects.
    ///
    /// # Errors
    /// The error of the work, or that its task panicked.
    pub async fn detached<R: Send + 'static>(
        self: &Arc<Self>,
        work: impl Future<Output = RuntimeResult<R>> + Send + 'static,
    ) -> RuntimeResult<R> {
        self.shell.spawn(work).await.map_err(|error| RuntimeError::other(format!("request task failed: {error}")))?
    }
}

/// Runs file operations on the blocking pool with the timeout [`FILES_LIMIT`]; `what` describes them in errors.
///
/// # Errors
/// The error of the work, or a timeout.
pub async fn blocking<R: Send + 'static>(
    what: &str,
    work: impl FnOnce() -> RuntimeResult<R> + Send + 'static,
) -> RuntimeResult<R> {
    match timeout(FILES_LIMIT, spawn_blocking(work)).await {
        Ok(done) => done.map_err(|error| RuntimeError::other(format!("{what}: {error}")))?,
        Err(_) => Err(RuntimeError::new(ErrorKind::Deadline, format!("{what} timed out after {FILES_LIMIT:?}"))),
    }
}

/// Wall-clock time, nanoseconds since the epoch.
pub fn now_ns() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}
