//! All sandboxes, and finding one; what the services stand on.
//!
//! What a caller began goes on when the caller leaves: whoever asks the same again joins it. Behaviour: spec 09 §9.

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
    actor::Pod,
    config::EmbeddedConfig,
    errors::{ErrorKind, RuntimeError, RuntimeResult},
    events::Hub,
    ids,
    logs::Logs,
    names::Names,
    ports::Ports,
    sandbox::Sandbox,
    shell::Shell,
    stats::{Meter, layers::Layers},
    store::{self, Layout},
    streams::Places,
    view,
};
use berth_metrics::{EmbeddedMetrics, EmbeddedObjects, Registry};
use berth_proto::cri;
use berth_shim::log_tally::LogTally;

/// Sandboxes that are made at once.
const SANDBOXES_AT_ONCE: usize = 8;
/// Containers that are started at once.
const STARTS_AT_ONCE: usize = 16;
/// How long file work may take.
pub const FILES_LIMIT: Duration = Duration::from_secs(30);

/// The embedded runtime.
pub struct Runtime {
    /// What all sandboxes share.
    pub shell: Arc<Shell>,
    /// The parts that touch the machine.
    pub ports: Ports,
    /// Facts about the machine.
    pub host: HostFacts,
    index: RwLock<Index>,
    /// Names of sandboxes.
    pub sandbox_names: Names<(Arc<cri::PodSandboxConfig>, String)>,
    /// Names of containers.
    pub container_names: Names<(Arc<cri::ContainerConfig>, String)>,
    /// What was used when somebody last looked.
    pub meter: Meter,
    /// What containers wrote.
    pub layers: Arc<Layers>,
    /// Sandboxes that are being made.
    pub creations: Semaphore,
    /// Containers that are being started.
    pub starts: Semaphore,
    /// Streams that wait to be met.
    pub streams: Places,
    ready: watch::Sender<bool>,
    _lock: store::Lock,
}

/// What is known of the machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostFacts {
    /// Tells this boot from others.
    pub boot_id: Arc<str>,
    /// The node's name.
    pub hostname: String,
    /// What `RuntimeConfig` tells.
    pub driver: cri::CgroupDriver,
    /// Whether mounts can be read-only with all below them.
    pub has_recursive_read_only: bool,
    /// Whether pods can have a user namespace.
    pub has_user_namespaces: bool,
}

#[derive(Default)]
struct Index {
    pods: BTreeMap<String, Pod>,
    /// The sandbox of each container.
    containers: BTreeMap<String, String>,
}

impl Runtime {
    /// Takes the lock and makes the directories; nothing runs yet.
    ///
    /// # Errors
    /// Another daemon is here, or the disk is not fit.
    pub fn open(
        config: EmbeddedConfig,
        ports: Ports,
        host: HostFacts,
        (tasks, stop): (TaskTracker, CancellationToken),
    ) -> RuntimeResult<Arc<Self>> {
        let lock = store::open(&Layout { root: config.root.clone(), state: config.state.clone() })?;
        // Counted for nobody.
        let metrics = EmbeddedMetrics::new(&Registry::new());
        Ok(Self::with_lock(config, ports, host, (tasks, stop), lock, metrics))
    }

    /// Likewise, with the lock taken already; what happens is counted.
    pub fn with_lock(
        config: EmbeddedConfig,
        ports: Ports,
        host: HostFacts,
        (tasks, stop): (TaskTracker, CancellationToken),
        lock: store::Lock,
        metrics: EmbeddedMetrics,
    ) -> Arc<Self> {
        let layout = Layout { root: config.root.clone(), state: config.state.clone() };
        let shell = Shell {
            config,
            layout,
            hub: Hub::default(),
            metrics,
            logs: Logs::default(),
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
            sandbox_names: Names::default(),
            container_names: Names::default(),
            meter: Meter::default(),
            layers: Arc::default(),
            creations: Semaphore::new(SANDBOXES_AT_ONCE),
            starts: Semaphore::new(STARTS_AT_ONCE),
            streams: Places::default(),
            ready: watch::channel(false).0,
            _lock: lock,
        })
    }

    /// What was there is known again: calls are answered from now on.
    pub fn set_ready(&self) {
        self.ready.send_replace(true);
    }

    /// Whether what was there is known again.
    pub fn is_ready(&self) -> bool {
        *self.ready.borrow()
    }

    /// Waits until what was there is known again.
    pub async fn until_ready(&self) {
        // The sender lives as long as we.
        let _ = self.ready.subscribe().wait_for(|ready| *ready).await;
    }

    /// Starts the owner of a sandbox.
    pub fn adopt(&self, sandbox: Sandbox) -> Pod {
        let id = sandbox.id().to_owned();
        let containers: Vec<_> = sandbox.containers.keys().cloned().collect();
        let pod = Pod::start(sandbox, self.shell.clone());
        let mut index = self.index.write().unwrap_or_else(PoisonError::into_inner);
        index.containers.extend(containers.into_iter().map(|container| (container, id.clone())));
        index.pods.insert(id, pod.clone());
        pod
    }

    /// A container is there.
    pub fn note_container(&self, container: &str, sandbox: &str) {
        let mut index = self.index.write().unwrap_or_else(PoisonError::into_inner);
        index.containers.insert(container.to_owned(), sandbox.to_owned());
    }

    /// A container is gone.
    pub fn forget_container(&self, container: &str) {
        self.meter.forget(container);
        self.layers.forget(container);
        self.index.write().unwrap_or_else(PoisonError::into_inner).containers.remove(container);
    }

    /// A sandbox is gone.
    pub fn forget_pod(&self, id: &str) {
        self.meter.forget(id);
        let mut index = self.index.write().unwrap_or_else(PoisonError::into_inner);
        index.pods.remove(id);
        index.containers.retain(|_, sandbox| sandbox != id);
    }

    /// The sandbox with that identity, or the only one that begins with it.
    ///
    /// # Errors
    /// There is none, or several.
    pub fn pod(&self, id: &str) -> RuntimeResult<Pod> {
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        let found = ids::find(&index.pods, id)?.filter(|pod| view::is_listed(&pod.now()));
        found.cloned().ok_or_else(|| RuntimeError::no_sandbox(id))
    }

    /// The container with that identity, or the only one that begins with it: its sandbox and its whole identity.
    ///
    /// # Errors
    /// There is none, or several.
    pub fn container(&self, id: &str) -> RuntimeResult<(Pod, String)> {
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        let none = || RuntimeError::no_container(id);
        let sandbox = ids::find(&index.containers, id)?.ok_or_else(none)?;
        let pod = index.pods.get(sandbox).ok_or_else(none)?;
        let now = pod.now();
        let whole = now.containers.keys().find(|whole| whole.starts_with(id)).ok_or_else(none)?;
        Ok((pod.clone(), whole.clone()))
    }

    /// All sandboxes.
    pub fn pods(&self) -> Vec<Pod> {
        self.index.read().unwrap_or_else(PoisonError::into_inner).pods.values().cloned().collect()
    }

    /// What containers have written to their logs. Blocking: reads a file in memory for each pod.
    pub fn written(&self) -> LogTally {
        let pods: Vec<_> = self.pods().iter().map(Pod::now).collect();
        self.shell.logs.sum(&self.shell.layout, pods.iter().map(|sandbox| sandbox.id()))
    }

    /// Pods and containers by state.
    pub fn held(&self) -> EmbeddedObjects {
        let mut pods = [("ready", 0), ("notready", 0)];
        let mut containers = [("created", 0), ("running", 0), ("exited", 0)];
        for sandbox in self.pods().iter().map(|pod| pod.now()).filter(|sandbox| view::is_listed(sandbox)) {
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

    /// Does what was asked also where whoever asked has left.
    ///
    /// # Errors
    /// What it fails with.
    pub async fn detached<R: Send + 'static>(
        self: &Arc<Self>,
        work: impl Future<Output = RuntimeResult<R>> + Send + 'static,
    ) -> RuntimeResult<R> {
        self.shell.spawn(work).await.map_err(|error| RuntimeError::other(format!("the call broke off: {error}")))?
    }
}

/// Does file work on the blocking pool, within a limit; `what` says which.
///
/// # Errors
/// What it fails with, and that it takes too long.
pub async fn blocking<R: Send + 'static>(
    what: &str,
    work: impl FnOnce() -> RuntimeResult<R> + Send + 'static,
) -> RuntimeResult<R> {
    match timeout(FILES_LIMIT, spawn_blocking(work)).await {
        Ok(done) => done.map_err(|error| RuntimeError::other(format!("{what}: {error}")))?,
        Err(_) => Err(RuntimeError::new(ErrorKind::Deadline, format!("{what} takes longer than {FILES_LIMIT:?}"))),
    }
}

/// Wall time, nanoseconds since the epoch.
pub fn now_ns() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}
