//! Puts the rooms together: the only file that knows all of them.
//!
//! The order is that of spec 01 §9: node, who may call, runtime, state files, players of the roles, engine,
//! sources, servers. Every task it starts ends with the token it is given.

use std::{
    net::IpAddr,
    path::Path,
    sync::{Arc, OnceLock},
    time::Duration,
};

use jiff::Timestamp;
use tokio::{sync::watch, time::timeout};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::info;

use super::{
    adapters::{SourceWarnings, follow_runtime_features, forward_deaths, running_logs},
    cluster::{self, Cluster, NodeParts},
    embedded,
    events::{EventLog, record_setup_failure, record_start_events},
    eviction, kernel,
    lasting::Lasting,
    life::Life,
    node_addresses,
    open_images::open_images,
    probes, root_directory, server,
    server_auth::{self, AuthDeps, ServerAuth},
    settings, shutdown,
    volumes::VolumeSeam,
};
use crate::{
    engine::{
        self, EngineConfig, Inputs, SourcesReady, WorkerContext,
        admission::{AdmissionRules, sysctls::Allowlist},
        allocation::{Allocator, AllocatorDeps, resize::ResizeRules},
    },
    logging::LogHandle,
    logs::{self, LogsDeps},
    node::{
        self, Machine,
        oom::{OomDeps, OomWatcher},
    },
    pleg::{self, PlegConfig, PlegDeps},
    resources::{self, IdRanges, ManagerDeps, cpu_state, kernel_flags, userns},
    runtime::{
        ActuatedStore, RuntimeCheck, RuntimeDeps, RuntimeManager,
        preparer::{Preparer, PreparerDeps},
    },
    serving::{
        pulses::Pulses,
        stats::{self, StatsParts},
    },
    shutdown::Drain,
    sources::{self, SourcesDeps},
    standalone::{self, NoMirrors},
};
use berth_config::Loaded;
use berth_cri::{Connection, RuntimeCgroupDriver, RuntimeInfo};
use berth_metrics::{
    AdmissionMetrics, AllocationMetrics, BuildInfo, CgroupMetrics, EngineMetrics, OomMetrics, PlegMetrics, Registry,
    RuntimeMetrics, SourceMetrics, StatusMetrics,
};
use berth_ports::{Clock, DiskStateFile, EventSink, MirrorPods, NodeFacts, PodObserver, ResourceManager, SystemClock};
use berth_server::ports::{Health, targets::Targets};
use berth_status::StatusManager;
use berth_sys::cgroup::{
    Hierarchy,
    systemd::{Bus, Units},
};

/// How long a runtime that is not there yet is waited for (spec 01 §20).
const RUNTIME_PATIENCE: Duration = Duration::from_secs(30);
/// How long what comes first is waited for before what builds on it starts all the same.
pub(super) const SETTLE: Duration = Duration::from_secs(2);
/// Capacity of the channel that tells of dead containers; lossy, garbage collection catches up.
const DEATHS: usize = 256;

/// Why the agent does not start; the text behind `failed to run Kubelet: `.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct BuildError(pub String);

pub(super) fn wrong(error: impl std::fmt::Display) -> BuildError {
    BuildError(error.to_string())
}

/// What the parts share.
pub(super) struct Base {
    pub(super) registry: Registry,
    pub(super) statuses: StatusMetrics,
    pub(super) events: Arc<dyn EventSink>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) stop: CancellationToken,
    pub(super) tasks: Lasting,
    pub(super) log: LogHandle,
    /// Of whom something is to be heard.
    pub(super) pulses: Pulses,
    /// Lets pods go where a signal shall.
    pub(super) drain: Arc<OnceLock<Arc<Drain>>>,
}

/// Builds and starts everything; returns the checks that tell whether it lives.
///
/// # Errors
/// What stands in the way, in the reference's words.
pub async fn build(loaded: &Loaded, life: &Life) -> Result<Arc<dyn Health>, BuildError> {
    let registry = Registry::new();
    registry.register_bookkeeping();
    let tasks = life.tasks.clone();
    register_identity(loaded, &registry, tasks.tracker());
    let root = loaded.root_directory();
    root_directory::make(&root)?;
    let machine = Machine::read(Path::new("/"), &root).map_err(wrong)?;
    let facts = node::facts(&settings::node(loaded), &machine).map_err(wrong)?;
    berth_metrics::register_node(&registry, facts.name.as_str());
    let mut base = Base {
        statuses: StatusMetrics::new(&registry),
        registry,
        events: Arc::new(EventLog::new(facts.name.as_str())),
        clock: Arc::new(SystemClock),
        stop: life.stop.clone(),
        tasks,
        log: life.log.clone(),
        pulses: Pulses::default(),
        drain: life.drain.clone(),
    };
    // Before the runtime is waited for: whoever mistyped a path shall not wait to hear of it.
    let cluster = cluster::join(loaded, &mut base, facts.name.as_str()).await?;
    let auth = who_may_call(loaded, &base, facts.name.as_str(), cluster.as_ref()).await?;
    let patience = RUNTIME_PATIENCE.min(loaded.config.runtime_request_timeout.std());
    let (connection, targets, info) = if loaded.is_runtime_embedded() {
        let embedded::Opened { connection, targets, recovery } = embedded::open(loaded, &base).await?;
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
    let known = Known { machine, facts, auth, targets, cluster };
    let assembled = assemble(loaded, &base, known, &connection, &info).await;
    if let Err(error) = &assembled {
        record_setup_failure(&*base.events, &error.0, has_cluster).await;
    }
    let health = assembled?;
    info!("Started kubelet");
    Ok(health)
}

/// What is known before the runtime is.
struct Known {
    machine: Machine,
    facts: NodeFacts,
    /// `None` where there is no main port.
    auth: Option<ServerAuth>,
    /// Streams of our own runtime.
    targets: Option<Arc<dyn Targets>>,
    /// `None` for a node on its own.
    cluster: Option<Cluster>,
}

async fn who_may_call(
    loaded: &Loaded,
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
    loaded: &Loaded,
    base: &Base,
    known: Known,
    connection: &Connection,
    info: &RuntimeInfo,
) -> Result<Arc<dyn Health>, BuildError> {
    let Known { machine, facts, auth, targets, mut cluster } = known;
    let machine = &machine;
    let root = loaded.root_directory();
    let node_name = facts.name.clone();
    let (node, facts) = watch::channel(Arc::new(facts));
    let (objects, beside) = match &cluster {
        Some(cluster) => (cluster.objects(), None),
        None => standalone::open().map_err(BuildError)?,
    };
    let status = Arc::new(StatusManager::new(base.statuses.clone()));
    let probes = probes::open(base, &root, connection, status.clone()).await?;

    let (resources, user_namespaces) = open_resources(loaded, base, machine, info).await?;

    let logs = logs::Manager::new(
        LogsDeps { cri: connection.runtime.clone(), clock: base.clock.clone() },
        settings::logs(loaded),
    );
    logs.create_directories().await.map_err(wrong)?;

    let (pleg, deaths) = start_pleg(base, connection, info, logs.clone());
    if let Some(rotation) = logs.start_rotation(running_logs(pleg.clone()), base.stop.child_token()) {
        base.tasks.spawn(rotation);
    }
    let health = pleg.clone();
    let checks = vec![("PLEG", Arc::new(move || health.health()) as Arc<dyn Fn() -> Option<String> + Send + Sync>)];
    let (check, runtime_state) = RuntimeCheck::new(connection.runtime.clone(), checks);
    base.tasks.spawn(check_runtime(check, pleg.clone(), base.stop.child_token()));
    base.tasks.spawn(follow_runtime_features(runtime_state.clone(), node.clone(), base.stop.child_token()));

    let images = open_images(loaded, base, connection, cluster.as_ref()).await?;
    let groups = stats::groups(loaded, cgroup_driver(loaded, info));
    let seen =
        eviction::WatchParts { machine, images: connection.images.clone(), groups: groups.clone(), node: node.clone() };
    let eviction = eviction::watch(loaded, base, seen).await?;
    let volume_seam = VolumeSeam::default();
    if let Some(cluster) = &cluster {
        let volumes = volume_seam.told();
        let parts = NodeParts { facts: node.clone(), runtime: runtime_state.clone(), images: images.clone(), volumes };
        let ranges = cluster.keep_node(loaded, base, machine, info, parts)?;
        cluster.tell_ranges(base, ranges, connection.runtime.clone());
    } else {
        node_addresses::publish_own(loaded, base, node.clone()).await?;
    }
    let volumes = volume_seam.open(loaded, base, (facts.clone(), objects.clone()), cluster.as_ref()).await;
    let preparer = Preparer::new(
        settings::preparer(loaded, machine, &node_name, kernel::read()),
        PreparerDeps {
            objects: objects.clone(),
            resources: resources.clone(),
            user_namespaces: user_namespaces.clone(),
            events: base.events.clone(),
            node: facts.clone(),
            runtime: runtime_state.clone(),
        },
    );
    preparer.check_resolv_conf().await;
    let runtime = RuntimeManager::new(
        RuntimeDeps {
            cri: connection.runtime.clone(),
            images: images.clone(),
            prepare: Arc::new(preparer),
            events: base.events.clone(),
            probes: probes.manager.clone(),
            resources: resources.clone(),
            objects: objects.clone(),
            logs,
            actuated: ActuatedStore::open(state_file(&root, "actuated_pods_state")).await.map_err(wrong)?,
            clock: base.clock.clone(),
            metrics: RuntimeMetrics::new(&base.registry),
        },
        settings::runtime(loaded, &info.name),
    );
    base.tasks.spawn(runtime.clone().run(base.stop.child_token()));
    base.tasks.spawn(forward_deaths(deaths, runtime.clone(), base.stop.child_token()));

    let allocator = open_allocator(loaded, base, machine, &root).await?;
    // Pods that come before the runtime is known to be well would be put off.
    let mut state = runtime_state.clone();
    let _ = timeout(SETTLE, state.wait_for(|state| state.runtime_error.is_none())).await;
    let sources = sources::start(
        settings::sources(loaded, &node_name, beside.is_some()),
        SourcesDeps {
            feed: cluster.as_ref().map(Cluster::feed),
            events: Arc::new(SourceWarnings(base.events.clone())),
            metrics: SourceMetrics::new(&base.registry),
            now: Arc::new(Timestamp::now),
        },
        &base.stop,
    );
    for task in sources.tasks {
        base.tasks.spawn(task);
    }
    let observer: Arc<dyn PodObserver> = pleg.clone();
    let allocations = allocator.allocations();
    let (reports, reported) = engine::reports();
    let context = Arc::new(WorkerContext {
        runtime: runtime.clone(),
        observer: pleg.clone(),
        volumes: volumes.clone(),
        probes: probes.manager.clone(),
        resources,
        objects,
        mirrors: cluster.as_ref().map_or_else(|| Arc::new(NoMirrors) as Arc<dyn MirrorPods>, Cluster::mirrors),
        events: base.events.clone(),
        clock: base.clock.clone(),
        allocations: allocations.clone(),
        status: status.clone(),
        node: facts,
        runtime_state,
        metrics: EngineMetrics::new(&base.registry),
        config: EngineConfig {
            sync_frequency: loaded.config.sync_frequency.std(),
            started_at: base.clock.now(),
            api_client: cluster.is_some(),
            prefer_ipv6: prefers_ipv6(loaded),
            ..EngineConfig::default()
        },
        reports,
        tasks: base.tasks.tracker().clone(),
        shutdown: base.stop.clone(),
    });
    let ready = SourcesReady::new(sources.registered);
    let engine = engine::start(context, Inputs { changes: sources.changes, reports: reported, ready, allocator });
    probes.wake_through(base, engine.commands.clone());
    let (pods, changes) = (engine.pods.clone(), status.changes());
    let oom = OomWatcher::new(OomDeps {
        pods,
        observer: observer.clone(),
        groups: groups.clone(),
        changes,
        events: base.events.clone(),
        metrics: OomMetrics::new(&base.registry),
        clock: base.clock.clone(),
        file: state_file(&root, "kernel_log_state"),
    });
    base.tasks.spawn(oom.run(base.stop.child_token()));
    let parts = shutdown::ShutdownParts { engine: &engine, status: status.clone(), node, is_told: cluster.is_some() };
    shutdown::open(loaded, base, parts).await?;
    base.tasks.spawn(runtime.clone().run_gc(Arc::new(engine.fates.clone()), base.stop.child_token()));
    if let Some(beside) = beside {
        base.tasks.spawn(beside.follow(engine.commands.clone(), base.stop.child_token()));
    }
    if let Some(cluster) = &mut cluster {
        cluster.write_statuses(base, status.clone());
        cluster.follow_changes(base, engine.commands.clone());
    }
    let (statistics, surveyors) = stats::open(
        loaded,
        machine,
        StatsParts {
            observer: observer.clone(),
            runtime: connection.runtime.clone(),
            images: connection.images.clone(),
            runtime_name: info.name.clone(),
            driver: cgroup_driver(loaded, info),
            node_name: node_name.clone(),
            pods: engine.pods.clone(),
            claimed: volumes,
            clock: base.clock.clone(),
            registry: base.registry.clone(),
            probes: probes.registry,
        },
    );
    base.tasks.spawn(surveyors.run(base.stop.child_token()));
    if loaded.gates.enabled("CSIVolumeHealth") {
        let (provider, stop) = (statistics.provider(), base.stop.child_token());
        base.tasks.spawn(async move { provider.ask_of_claims_now_and_then(stop).await });
    }
    let acting = eviction::ActParts { engine: &engine, allocations, statistics: &statistics, runtime, images };
    eviction::act(base, eviction, acting);
    let cri = connection.runtime.clone();
    let runtime = info.name.clone();
    let parts = server::Parts { engine, status, observer, cri, statistics, runtime, targets, probes: probes.manager };
    server::start(loaded, base, parts, auth).await
}

/// Whether the node's first address is IPv6.
fn prefers_ipv6(loaded: &Loaded) -> bool {
    berth_config::node_ips(&loaded.flags.node_ip).is_ok_and(|given| given.ips.first().is_some_and(IpAddr::is_ipv6))
}

/// Checks the runtime from the moment that PLEG, whose health is part of it, can have any.
async fn check_runtime(check: RuntimeCheck, pleg: Arc<pleg::Pleg>, stop: CancellationToken) {
    tokio::select! {
        () = stop.cancelled() => return,
        _ = timeout(SETTLE, pleg.listed()) => {}
    }
    check.run(stop).await;
}

fn state_file(root: &Path, name: &str) -> Arc<DiskStateFile> {
    Arc::new(DiskStateFile::new(root.join(name)))
}

/// Version, gates and process, as metrics.
fn register_identity(loaded: &Loaded, registry: &Registry, tasks: &TaskTracker) {
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

fn start_pleg(
    base: &Base,
    connection: &Connection,
    info: &RuntimeInfo,
    messages: Arc<logs::Manager>,
) -> (Arc<pleg::Pleg>, tokio::sync::mpsc::Receiver<pleg::ContainerDied>) {
    let mut hints: Vec<Arc<dyn pleg::EventHints>> = vec![Arc::new(pleg::CriEvents::new(connection.runtime.clone()))];
    if &*info.name == "containerd" {
        hints.push(Arc::new(pleg::ContainerdEvents::new(connection.runtime_channel())));
    }
    let (died, deaths) = tokio::sync::mpsc::channel(DEATHS);
    let deps = PlegDeps {
        cri: connection.runtime.clone(),
        hints,
        messages,
        clock: base.clock.clone(),
        metrics: PlegMetrics::new(&base.registry),
        died: Some(died),
    };
    let (pleg, task) = pleg::start(deps, PlegConfig::default(), base.stop.child_token());
    base.tasks.spawn(task);
    (pleg, deaths)
}

/// Who makes control groups. The runtime's word wins over the configuration's (spec 01 §13).
fn cgroup_driver(loaded: &Loaded, info: &RuntimeInfo) -> resources::Driver {
    match info.cgroup_driver {
        RuntimeCgroupDriver::Systemd => resources::Driver::Systemd,
        RuntimeCgroupDriver::AsConfigured if loaded.config.cgroup_driver == "systemd" => resources::Driver::Systemd,
        RuntimeCgroupDriver::Cgroupfs | RuntimeCgroupDriver::AsConfigured => resources::Driver::Cgroupfs,
    }
}

/// systemd, where it makes control groups and is there; who needs it says where it is not.
fn units(driver: resources::Driver) -> Option<Arc<dyn Units>> {
    let bus = (driver == resources::Driver::Systemd).then(Bus::of_this_machine)?;
    bus.ok().map(|bus| Arc::new(bus) as Arc<dyn Units>)
}

/// Kernel settings, pod cgroups and host ids.
async fn open_resources(
    loaded: &Loaded,
    base: &Base,
    machine: &Machine,
    info: &RuntimeInfo,
) -> Result<(Arc<dyn ResourceManager>, Arc<IdRanges>), BuildError> {
    let driver = cgroup_driver(loaded, info);
    let per_pod = loaded.config.user_namespaces.as_ref().and_then(|u| u.ids_per_pod).unwrap_or(65536);
    let max_pods = u64::try_from(loaded.config.max_pods).unwrap_or_default();
    let space = userns::discover(u64::try_from(per_pod).unwrap_or(65536), max_pods).await.map_err(wrong)?;
    let ids = Arc::new(IdRanges::open(&loaded.root_directory(), space).await.map_err(wrong)?);
    let hierarchy = if loaded.config.cgroups_per_qos { Some(Hierarchy::detect().map_err(wrong)?) } else { None };
    let metrics = CgroupMetrics::new(&base.registry);
    if let Some(hierarchy) = &hierarchy {
        metrics.set_version(hierarchy.version());
    }
    let manager = resources::Manager::new(
        settings::resources(loaded, machine, driver)?,
        hierarchy,
        ManagerDeps { events: base.events.clone(), metrics, ids: ids.clone(), units: units(driver) },
    )
    .map_err(wrong)?;
    // Under another policy the file is not ours to judge: `berth_config::effective` tells that it has no effect yet.
    if loaded.config.cpu_manager_policy == cpu_state::POLICY_NONE {
        let file = state_file(&loaded.root_directory(), "cpu_manager_state");
        cpu_state::take_over(&*file).await.map_err(wrong)?;
    }
    let on_difference = settings::kernel_flags(loaded, berth_sys::machine::in_user_namespace());
    kernel_flags::apply(Path::new("/proc/sys"), on_difference).await.map_err(wrong)?;
    manager.start().await.map_err(wrong)?;
    base.tasks.spawn(manager.clone().run(base.stop.child_token()));
    Ok((manager, ids))
}

async fn open_allocator(loaded: &Loaded, base: &Base, machine: &Machine, root: &Path) -> Result<Allocator, BuildError> {
    let sysctls = Allowlist::new(machine.kernel_version, &loaded.config.allowed_unsafe_sysctls).map_err(wrong)?;
    let deps = AllocatorDeps {
        file: state_file(root, "allocated_pods_state"),
        events: base.events.clone(),
        clock: base.clock.clone(),
        rules: AdmissionRules {
            sysctls,
            apparmor_enabled: machine.apparmor_enabled,
            pod_level_resources: loaded.gates.enabled("PodLevelResources"),
            node_declared_features: loaded.gates.enabled("NodeDeclaredFeatures"),
            resize: ResizeRules {
                pod_level: loaded.gates.enabled("InPlacePodLevelResourcesVerticalScaling"),
                swap_is_limited: loaded.config.memory_swap.swap_behavior == "LimitedSwap"
                    && kernel::read().swap_controllable,
                ..ResizeRules::default()
            },
        },
        admission: AdmissionMetrics::new(&base.registry),
        allocation: AllocationMetrics::new(&base.registry),
    };
    Allocator::load(deps).await.map_err(wrong)
}
