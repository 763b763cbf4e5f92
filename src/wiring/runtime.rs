//! Opens the runtime manager, and the preparer of sandboxes and containers.

use std::sync::Arc;

use tokio::sync::mpsc;

use super::{
    adapters::forward_deaths,
    composition_root::{Base, BuildError, CoreParts, state_file, wrong},
    kernel, memory_qos, settings,
};
use crate::{
    logs,
    pleg::ContainerDied,
    resources::IdRanges,
    runtime::{
        ActuatedStore, RuntimeDeps, RuntimeManager,
        preparer::{Preparer, PreparerDeps},
    },
};
use berth_config::LoadedConfig;
use berth_metrics::RuntimeMetrics;

/// Dependencies of the runtime manager.
pub(super) struct RuntimeParts {
    pub(super) logs: Arc<logs::LogManager>,
    pub(super) user_namespaces: Arc<IdRanges>,
    /// Containers that have died; their surplus instances are removed.
    pub(super) deaths: mpsc::Receiver<ContainerDied>,
}

/// Opens the runtime manager.
///
/// # Errors
/// If its checkpoint cannot be read.
pub(super) async fn open(
    loaded: &LoadedConfig,
    base: &Base,
    core: &CoreParts<'_>,
    parts: RuntimeParts,
) -> Result<Arc<RuntimeManager>, BuildError> {
    let node_name = core.node.borrow().name.clone();
    let kernel = kernel::read();
    let memory_qos = memory_qos::of_containers(loaded, core.machine, kernel.cgroup_v2)?;
    let preparer = Preparer::new(
        settings::preparer(loaded, core.machine, &node_name, kernel, memory_qos),
        PreparerDeps {
            objects: core.objects.clone(),
            resources: core.resources.clone(),
            devices: core.allocators.devices.pods.clone(),
            claims: core.allocators.claims.pods.clone(),
            user_namespaces: parts.user_namespaces,
            events: base.events.clone(),
            node: core.node.subscribe(),
            runtime: core.runtime_state.clone(),
        },
    );
    preparer.check_resolv_conf().await;
    let deps = RuntimeDeps {
        cri: core.cri.clone(),
        images: core.images.clone(),
        prepare: Arc::new(preparer),
        events: base.events.clone(),
        probes: core.probes.clone(),
        resources: core.resources.clone(),
        objects: core.objects.clone(),
        logs: parts.logs,
        actuated: ActuatedStore::open(state_file(loaded, "actuated_pods_state")).await.map_err(wrong)?,
        clock: base.clock.clone(),
        metrics: RuntimeMetrics::new(&base.registry),
    };
    let runtime = RuntimeManager::new(deps, settings::runtime(loaded, &core.info.name));
    base.tasks.spawn(runtime.clone().run(base.stop.child_token()));
    base.tasks.spawn(forward_deaths(parts.deaths, runtime.clone(), base.stop.child_token()));
    Ok(runtime)
}
