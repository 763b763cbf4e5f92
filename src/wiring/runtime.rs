//! Opens the runtime manager, and the preparer of sandboxes and containers.

use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use super::{
    adapters::forward_deaths,
    build::{Base, BuildError, state_file, wrong},
    kernel, settings,
};
use crate::{
    images, logs,
    node::Machine,
    pleg::ContainerDied,
    resources::IdRanges,
    runtime::{
        ActuatedStore, RuntimeDeps, RuntimeManager,
        preparer::{Preparer, PreparerDeps},
    },
};
use berth_config::Loaded;
use berth_cri::{RuntimeInfo, RuntimeService};
use berth_metrics::RuntimeMetrics;
use berth_ports::{NodeFacts, ObjectSource, ProbeManager, ResourceManager, RuntimeState};

/// Dependencies of the runtime manager.
pub(super) struct RuntimeParts<'a> {
    pub(super) machine: &'a Machine,
    pub(super) info: &'a RuntimeInfo,
    pub(super) cri: Arc<dyn RuntimeService>,
    pub(super) facts: watch::Receiver<Arc<NodeFacts>>,
    pub(super) runtime_state: watch::Receiver<Arc<RuntimeState>>,
    pub(super) images: Arc<images::Manager>,
    pub(super) logs: Arc<logs::Manager>,
    pub(super) probes: Arc<dyn ProbeManager>,
    pub(super) resources: Arc<dyn ResourceManager>,
    pub(super) user_namespaces: Arc<IdRanges>,
    pub(super) objects: Arc<dyn ObjectSource>,
    /// Containers that have died; their surplus instances are removed.
    pub(super) deaths: mpsc::Receiver<ContainerDied>,
}

/// Opens the runtime manager.
///
/// # Errors
/// If its checkpoint cannot be read.
pub(super) async fn open(
    loaded: &Loaded,
    base: &Base,
    parts: RuntimeParts<'_>,
) -> Result<Arc<RuntimeManager>, BuildError> {
    let node_name = parts.facts.borrow().name.clone();
    let preparer = Preparer::new(
        settings::preparer(loaded, parts.machine, &node_name, kernel::read()),
        PreparerDeps {
            objects: parts.objects.clone(),
            resources: parts.resources.clone(),
            user_namespaces: parts.user_namespaces,
            events: base.events.clone(),
            node: parts.facts,
            runtime: parts.runtime_state,
        },
    );
    preparer.check_resolv_conf().await;
    let deps = RuntimeDeps {
        cri: parts.cri,
        images: parts.images,
        prepare: Arc::new(preparer),
        events: base.events.clone(),
        probes: parts.probes,
        resources: parts.resources,
        objects: parts.objects,
        logs: parts.logs,
        actuated: ActuatedStore::open(state_file(loaded, "actuated_pods_state")).await.map_err(wrong)?,
        clock: base.clock.clone(),
        metrics: RuntimeMetrics::new(&base.registry),
    };
    let runtime = RuntimeManager::new(deps, settings::runtime(loaded, &parts.info.name));
    base.tasks.spawn(runtime.clone().run(base.stop.child_token()));
    base.tasks.spawn(forward_deaths(parts.deaths, runtime.clone(), base.stop.child_token()));
    Ok(runtime)
}
