//! Opens the engine: admission and allocation, sources, sync loop.

use std::{net::IpAddr, sync::Arc};

use jiff::Timestamp;
use tokio::time::timeout;

use super::{
    adapters::SourceWarnings,
    cluster::Cluster,
    composition_root::{Base, BuildError, CoreParts, SETTLE, state_file, wrong},
    kernel, settings,
};
use crate::{
    engine::{
        self, EngineConfig, EngineHandle, SourceReadiness, SyncLoopInputs, WorkerContext,
        admission::{AdmissionRules, sysctls::Allowlist},
        allocation::{Allocations, Allocator, AllocatorDeps, resize::ResizeRules},
    },
    node::MachineInfo,
    pleg::Pleg,
    runtime::RuntimeManager,
    sources::{self, RunningSources, SourcesDeps},
    standalone::NoMirrors,
};
use berth_config::LoadedConfig;
use berth_metrics::{AdmissionMetrics, AllocationMetrics, EngineMetrics, SourceMetrics};
use berth_ports::{MirrorPods, VolumeManager};

/// What the engine works with, beside the core.
pub(super) struct EngineParts<'a> {
    pub(super) cluster: Option<&'a Cluster>,
    pub(super) runtime: Arc<RuntimeManager>,
    pub(super) observer: Arc<Pleg>,
    pub(super) volumes: Arc<dyn VolumeManager>,
    /// Whether ConfigMaps and Secrets of a directory exist.
    pub(super) has_objects: bool,
}

/// Opens the engine; from then on it receives pods from the sources.
///
/// # Errors
/// If the allocation checkpoint or a sysctl pattern is invalid.
pub(super) async fn open(
    loaded: &LoadedConfig,
    base: &Base,
    core: &CoreParts<'_>,
    parts: EngineParts<'_>,
) -> Result<(EngineHandle, Allocations), BuildError> {
    let allocator = open_allocator(loaded, base, core.machine).await?;
    // Pods that arrive before the runtime is known to be healthy would be delayed.
    let mut state = core.runtime_state.clone();
    let _ = timeout(SETTLE, state.wait_for(|state| state.runtime_error.is_none())).await;
    let sources = start_sources(loaded, base, core, &parts);
    let allocations = allocator.allocations();
    let (reports, reported) = engine::reports();
    let mirrors = parts.cluster.map_or_else(|| Arc::new(NoMirrors) as Arc<dyn MirrorPods>, Cluster::mirrors);
    let context = Arc::new(WorkerContext {
        runtime: parts.runtime,
        observer: parts.observer,
        volumes: parts.volumes,
        probes: core.probes.clone(),
        resources: core.resources.clone(),
        devices: core.allocators.devices.pods.clone(),
        claims: core.allocators.claims.pods.clone(),
        objects: core.objects.clone(),
        mirrors,
        events: base.events.clone(),
        clock: base.clock.clone(),
        allocations: allocations.clone(),
        status: core.status.clone(),
        node: core.node.subscribe(),
        runtime_state: core.runtime_state.clone(),
        metrics: EngineMetrics::new(&base.registry),
        config: EngineConfig {
            sync_frequency: loaded.config.sync_frequency.std(),
            started_at: base.clock.now(),
            api_client: parts.cluster.is_some(),
            prefer_ipv6: prefers_ipv6(loaded),
            resource_health: loaded.gates.enabled("ResourceHealthStatus"),
            ..EngineConfig::default()
        },
        reports,
        tasks: base.tasks.tracker().clone(),
        shutdown: base.stop.clone(),
    });
    let ready = SourceReadiness::new(sources.registered);
    let engine =
        engine::start(context, SyncLoopInputs { changes: sources.changes, reports: reported, ready, allocator });
    Ok((engine, allocations))
}

fn start_sources(loaded: &LoadedConfig, base: &Base, core: &CoreParts<'_>, parts: &EngineParts<'_>) -> RunningSources {
    let node = core.node.borrow().name.clone();
    let mut sources = sources::start(
        settings::sources(loaded, &node, parts.has_objects),
        SourcesDeps {
            feed: parts.cluster.map(Cluster::feed),
            events: Arc::new(SourceWarnings(base.events.clone())),
            metrics: SourceMetrics::new(&base.registry),
            now: Arc::new(Timestamp::now),
        },
        &base.stop,
    );
    for task in std::mem::take(&mut sources.tasks) {
        base.tasks.spawn(task);
    }
    sources
}

/// Returns whether the node's first address is IPv6.
fn prefers_ipv6(loaded: &LoadedConfig) -> bool {
    berth_config::node_ips(&loaded.flags.node_ip).is_ok_and(|given| given.ips.first().is_some_and(IpAddr::is_ipv6))
}

async fn open_allocator(loaded: &LoadedConfig, base: &Base, machine: &MachineInfo) -> Result<Allocator, BuildError> {
    let has_static_cpus = loaded.config.cpu_manager_policy == "static";
    let resizes_exclusive_cpus = loaded.gates.enabled("InPlacePodVerticalScalingExclusiveCPUs");
    let sysctls = Allowlist::new(machine.kernel_version, &loaded.config.allowed_unsafe_sysctls).map_err(wrong)?;
    let deps = AllocatorDeps {
        file: state_file(loaded, "allocated_pods_state"),
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
                cpu_manager_is_static: has_static_cpus && !resizes_exclusive_cpus,
                memory_manager_is_static: loaded.config.memory_manager_policy == "Static"
                    && !loaded.gates.enabled("InPlacePodVerticalScalingExclusiveMemory"),
                allocates_cpus: has_static_cpus && resizes_exclusive_cpus,
            },
        },
        admission: AdmissionMetrics::new(&base.registry),
        allocation: AllocationMetrics::new(&base.registry),
    };
    Allocator::load(deps).await.map_err(wrong)
}
