//! Composition root: builds and starts all parts of the agent.
//!
//! The order follows spec 01 §9: node, server authentication, runtime, state files, implementations of the ports,
//! engine, sources, servers. Every task that it starts ends with the cancellation token of the process.

use std::{
    path::Path,
    sync::{Arc, OnceLock},
    time::Duration,
};

use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::info;

use super::{
    allocators::Allocators,
    cluster::{self, Cluster},
    embedded,
    engine::{self, EngineParts},
    events::{record_setup_failure, record_start_events},
    eviction,
    images::open_images,
    observation::{self, RuntimeObservation},
    placement, probes,
    process_lifecycle::ProcessContext,
    resources::{self, cgroup_driver},
    root_directory,
    runtime::{self, RuntimeParts},
    server,
    server_auth::{self, AuthDeps, ServerAuth},
    settings, shutdown, volumes,
};
use crate::{
    engine::EngineHandle,
    images,
    logging::LogHandle,
    node::{
        self, IdFiles, MachineInfo,
        oom::{OomDeps, OomWatcher},
    },
    serving::{
        stats::{self, StatsPages, StatsPagesDeps},
        task_liveness::TaskLivenessRegistry,
    },
    shutdown::Drain,
    standalone,
    task_supervisor::TaskSupervisor,
};
use berth_config::LoadedConfig;
use berth_cri::{CriClients, RuntimeInfo, RuntimeService};
use berth_metrics::{BuildInfo, OomMetrics, Registry, StatusMetrics};
use berth_ports::{
    ClaimedVolumes, Clock, DiskStateFile, EventSink, NodeFacts, ObjectSource, PodObserver, ProbeManager,
    ResourceManager, RuntimeState, SystemClock,
};
use berth_server::ports::{Health, stream_targets::StreamTargets};
use berth_stats::PodCgroupPaths;
use berth_status::StatusManager;

/// Timeout for a runtime that is not available yet (spec 01 §20).
const RUNTIME_PATIENCE: Duration = Duration::from_secs(30);
/// Timeout for a prerequisite, after which its dependents start regardless.
pub(super) const SETTLE: Duration = Duration::from_secs(2);

/// Why the agent does not start: the text after `failed to run Kubelet: `.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct BuildError(pub String);

pub(super) fn wrong(error: impl std::fmt::Display) -> BuildError {
    BuildError(error.to_string())
}

/// Dependencies that all parts share.
pub(super) struct Base {
    pub(super) registry: Registry,
    pub(super) statuses: StatusMetrics,
    pub(super) events: Arc<dyn EventSink>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) stop: CancellationToken,
    pub(super) tasks: TaskSupervisor,
    pub(super) log: LogHandle,
    /// Liveness of the supervised tasks.
    pub(super) liveness: TaskLivenessRegistry,
    /// Drains pods on a termination signal, if configured; set once.
    pub(super) drain: Arc<OnceLock<Arc<Drain>>>,
}

/// Builds and starts everything; returns the health checks.
///
/// # Errors
/// Why the agent cannot start, with kubelet's texts.
pub async fn build(loaded: &LoadedConfig, life: &ProcessContext) -> Result<Arc<dyn Health>, BuildError> {
    let registry = Registry::new();
    registry.register_bookkeeping();
    let tasks = life.tasks.clone();
    register_identity(loaded, &registry, tasks.tracker());
    let root = loaded.root_directory();
    root_directory::make(&root)?;
    let ids = IdFiles { machine: &loaded.flags.machine_id_file, boot: &loaded.flags.boot_id_file };
    let machine = MachineInfo::read(Path::new("/"), &root, ids).map_err(wrong)?;
    let facts = node::facts(&settings::node(loaded), &machine).map_err(wrong)?;
    berth_metrics::register_node(&registry, facts.name.as_str());
    if let Some(settings) = settings::traces(loaded, facts.name.as_str()) {
        berth_otel::start_export(&settings, &registry).map_err(wrong)?;
    }
    let mut base = Base {
        statuses: StatusMetrics::new(&registry),
        registry,
        events: Arc::new(standalone::EventLog::new(facts.name.as_str())),
        clock: Arc::new(SystemClock),
        stop: life.stop.clone(),
        tasks,
        log: life.log.clone(),
        liveness: TaskLivenessRegistry::default(),
        drain: life.drain.clone(),
    };
    // Before waiting for the runtime: a mistyped path is reported without delay.
    let cluster = cluster::join(loaded, &mut base, facts.name.as_str()).await?;
    let auth = open_server_auth(loaded, &base, facts.name.as_str(), cluster.as_ref()).await?;
    let patience = RUNTIME_PATIENCE.min(loaded.config.runtime_request_timeout.std());
    let (connection, targets, info) = if loaded.is_runtime_embedded() {
        let embedded::EmbeddedRuntime { connection, targets, recovery } = embedded::open(loaded, &base).await?;
        let info = tokio::select! {
            info = berth_cri::probe(&connection, &base.registry, patience) => info.map_err(wrong)?,
            cause = recovery.failed() => return Err(wrong(cause)),
        };
        (connection, Some(targets), info)
    } else {
        let connection = berth_cri::connect(&settings::cri(loaded), &base.registry).map_err(wrong)?;
        let info = berth_cri::probe(&connection, &base.registry, patience).await.map_err(wrong)?;
        (connection, None, info)
    };
    record_start_events(&*base.events, loaded.host.cgroup_v1);
    let has_cluster = cluster.is_some();
    let known = Prerequisites { machine, facts, auth, targets, cluster };
    let assembled = assemble(loaded, &base, known, &connection, &info).await;
    if let Err(error) = &assembled {
        record_setup_failure(&*base.events, &error.0, has_cluster).await;
    }
    let health = assembled?;
    info!("Started kubelet");
    Ok(health)
}

/// Everything that is known before the runtime is.
struct Prerequisites {
    machine: MachineInfo,
    facts: NodeFacts,
    /// `None` if the main port is disabled.
    auth: Option<ServerAuth>,
    /// Streaming targets of the embedded runtime.
    targets: Option<Arc<dyn StreamTargets>>,
    /// `None` in standalone mode.
    cluster: Option<Cluster>,
}

async fn open_server_auth(
    loaded: &LoadedConfig,
    base: &Base,
    node: &str,
    cluster: Option<&Cluster>,
) -> Result<Option<ServerAuth>, BuildError> {
    if !loaded.config.enable_server {
        return Ok(None);
    }
    let (registry, tasks, stop, clock) = (&base.registry, base.tasks.tracker(), &base.stop, base.clock.clone());
    let api = cluster.map(Cluster::api);
    server_auth::open(AuthDeps { loaded, api, registry, tasks, stop, clock, node }).await.map(Some)
}

async fn assemble(
    loaded: &LoadedConfig,
    base: &Base,
    known: Prerequisites,
    connection: &CriClients,
    info: &RuntimeInfo,
) -> Result<Arc<dyn Health>, BuildError> {
    let Prerequisites { machine, facts, auth, targets, mut cluster } = known;
    let machine = &machine;
    let node_name = facts.name.clone();
    let node = watch::Sender::new(Arc::new(facts));
    let (objects, manifests) = match &cluster {
        Some(cluster) => (cluster.objects(), None),
        None => standalone::open().map_err(BuildError)?,
    };
    let status = Arc::new(StatusManager::new(base.statuses.clone()));
    let probes = probes::open(base, connection, status.clone(), state_file(loaded, "probe_results_state")).await?;
    let placement = placement::open(loaded, base, machine, &*connection.runtime).await?;
    let (resources, user_namespaces) = resources::open(loaded, base, machine, info, placement.clone()).await?;
    let RuntimeObservation { logs, pleg, deaths, runtime_state } =
        observation::open(loaded, base, connection, info, node.clone()).await?;
    let allocators = Allocators::open(loaded, base, cluster.as_ref(), placement.clone(), &node).await?;
    let images = open_images(loaded, base, connection, cluster.as_ref()).await?;
    let groups = stats::groups(loaded, cgroup_driver(loaded, info));
    let watched =
        eviction::WatchParts { machine, images: connection.images.clone(), groups: groups.clone(), node: node.clone() };
    let eviction = eviction::watch(loaded, base, watched).await?;
    let core = CoreParts {
        machine,
        info,
        cri: connection.runtime.clone(),
        node: node.clone(),
        runtime_state,
        images: images.clone(),
        probes: probes.manager.clone(),
        resources,
        allocators: allocators.clone(),
        objects,
        status: status.clone(),
    };
    let volumes = volumes::open(loaded, base, &core, cluster.as_ref()).await?;
    let runtime = runtime::open(loaded, base, &core, RuntimeParts { logs, user_namespaces, deaths }).await?;
    let parts = EngineParts {
        cluster: cluster.as_ref(),
        runtime: runtime.clone(),
        observer: pleg.clone(),
        volumes: volumes.clone(),
        has_objects: manifests.is_some(),
    };
    let (engine, allocations) = engine::open(loaded, base, &core, parts).await?;
    probes.wake_through(base, engine.commands.clone());
    allocators.resync_through(&engine.commands);
    let observer: Arc<dyn PodObserver> = pleg;
    let (pods, runtime_service) = (engine.pods.clone(), connection.runtime.clone());
    placement::reconcile(loaded, base, placement, pods, observer.clone(), runtime_service);
    watch_oom_kills(loaded, base, &engine, &status, observer.clone(), groups);
    let parts =
        shutdown::ShutdownParts { engine: &engine, status: status.clone(), node, reports_statuses: cluster.is_some() };
    shutdown::open(loaded, base, parts).await?;
    base.tasks.spawn(runtime.clone().run_gc(Arc::new(engine.pods.clone()), base.stop.child_token()));
    if let Some(manifests) = manifests {
        base.tasks.spawn(manifests.follow(engine.commands.clone(), base.stop.child_token()));
    }
    if let Some(cluster) = &mut cluster {
        cluster.write_statuses(base, status.clone());
        cluster.follow_changes(base, engine.commands.clone());
    }
    let parts = StatisticsParts {
        machine,
        connection,
        info,
        engine: &engine,
        observer: observer.clone(),
        claimed: volumes,
        node_name,
        probes: probes.registry,
    };
    let statistics = open_statistics(loaded, base, parts);
    let acting = eviction::ActParts { engine: &engine, allocations, statistics: &statistics, runtime, images };
    eviction::start_evictor(base, eviction, acting);
    let (cri, runtime, probes) = (connection.runtime.clone(), info.name.clone(), probes.manager);
    let parts = server::Parts { engine, status, observer, cri, statistics, runtime, targets, probes, allocators };
    server::start(loaded, base, parts, auth).await
}

/// Parts that most of the others work with.
pub(super) struct CoreParts<'a> {
    pub(super) machine: &'a MachineInfo,
    pub(super) info: &'a RuntimeInfo,
    pub(super) cri: Arc<dyn RuntimeService>,
    /// Facts about the node, for those who publish some.
    pub(super) node: watch::Sender<Arc<NodeFacts>>,
    pub(super) runtime_state: watch::Receiver<Arc<RuntimeState>>,
    pub(super) images: Arc<images::ImageManager>,
    pub(super) probes: Arc<dyn ProbeManager>,
    pub(super) resources: Arc<dyn ResourceManager>,
    pub(super) allocators: Allocators,
    pub(super) objects: Arc<dyn ObjectSource>,
    pub(super) status: Arc<StatusManager>,
}

fn watch_oom_kills(
    loaded: &LoadedConfig,
    base: &Base,
    engine: &EngineHandle,
    status: &StatusManager,
    observer: Arc<dyn PodObserver>,
    groups: Arc<dyn PodCgroupPaths>,
) {
    let watcher = OomWatcher::new(OomDeps {
        pods: engine.pods.clone(),
        observer,
        groups,
        changes: status.changes(),
        events: base.events.clone(),
        metrics: OomMetrics::new(&base.registry),
        clock: base.clock.clone(),
        file: state_file(loaded, "kernel_log_state"),
    });
    base.tasks.spawn(watcher.run(base.stop.child_token()));
}

/// Dependencies of statistics, besides the node.
struct StatisticsParts<'a> {
    machine: &'a MachineInfo,
    connection: &'a CriClients,
    info: &'a RuntimeInfo,
    engine: &'a EngineHandle,
    observer: Arc<dyn PodObserver>,
    claimed: Arc<dyn ClaimedVolumes>,
    node_name: String,
    probes: Registry,
}

fn open_statistics(loaded: &LoadedConfig, base: &Base, parts: StatisticsParts<'_>) -> Arc<StatsPages> {
    let StatisticsParts { machine, connection, info, engine, observer, claimed, node_name, probes } = parts;
    let (statistics, surveyors) = stats::open(
        loaded,
        machine,
        StatsPagesDeps {
            observer,
            runtime: connection.runtime.clone(),
            images: connection.images.clone(),
            runtime_name: info.name.clone(),
            driver: cgroup_driver(loaded, info),
            node_name,
            pods: engine.pods.clone(),
            claimed,
            clock: base.clock.clone(),
            registry: base.registry.clone(),
            probes,
        },
    );
    base.tasks.spawn(surveyors.run(base.stop.child_token()));
    if loaded.gates.enabled("CSIVolumeHealth") {
        let (provider, stop) = (statistics.provider(), base.stop.child_token());
        base.tasks.spawn(async move { provider.poll_claimed_volumes(stop).await });
    }
    statistics
}

/// A state file in the root directory.
pub(super) fn state_file(loaded: &LoadedConfig, name: &str) -> Arc<DiskStateFile> {
    Arc::new(DiskStateFile::new(loaded.root_directory().join(name)))
}

/// Registers metrics of build info, feature gates, and process.
fn register_identity(loaded: &LoadedConfig, registry: &Registry, tasks: &TaskTracker) {
    let info = BuildInfo {
        major: "1".to_owned(),
        minor: "36".to_owned(),
        git_version: loaded.version.clone(),
        compiler: "rustc".to_owned(),
        platform: format!("linux/{}", node::architecture()),
    };
    berth_metrics::register_build_info(registry, &info);
    let gates = loaded.gates.all().map(|(gate, enabled)| (gate.name, gate.stage.label(), enabled));
    berth_metrics::register_features(registry, gates);
    let tasks = tasks.clone();
    berth_metrics::register_process(registry, move || tasks.len());
}
