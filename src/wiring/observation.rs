//! Opens what observes the runtime: logs, PLEG, and the runtime check.

use std::sync::Arc;

use tokio::{
    sync::{mpsc, watch},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use super::{
    adapters::{follow_runtime_features, running_logs},
    composition_root::{Base, BuildError, SETTLE, wrong},
    settings,
};
use crate::{
    logs::{self, LogsDeps},
    pleg::{self, PlegConfig, PlegDeps},
    runtime::RuntimeCheck,
};
use berth_config::LoadedConfig;
use berth_cri::{CriClients, RuntimeInfo};
use berth_metrics::PlegMetrics;
use berth_ports::{NodeFacts, PodObserver, RuntimeState};

/// Capacity of the channel of dead containers. Lossy: garbage collection removes what it misses.
const DEATHS: usize = 256;

/// Log manager, PLEG, and state of the runtime.
pub(super) struct RuntimeObservation {
    pub(super) logs: Arc<logs::LogManager>,
    pub(super) pleg: Arc<pleg::Pleg>,
    /// Containers that have died.
    pub(super) deaths: mpsc::Receiver<pleg::ContainerDied>,
    pub(super) runtime_state: watch::Receiver<Arc<RuntimeState>>,
}

/// Opens them. Features of the runtime are published in the node's facts.
///
/// # Errors
/// The log directories cannot be created.
pub(super) async fn open(
    loaded: &LoadedConfig,
    base: &Base,
    connection: &CriClients,
    info: &RuntimeInfo,
    node: watch::Sender<Arc<NodeFacts>>,
) -> Result<RuntimeObservation, BuildError> {
    let logs = logs::LogManager::new(
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
    base.tasks.spawn(follow_runtime_features(runtime_state.clone(), node, base.stop.child_token()));
    Ok(RuntimeObservation { logs, pleg, deaths, runtime_state })
}

/// Starts the runtime check once PLEG has listed the runtime, or after a timeout: the check includes PLEG's health.
async fn check_runtime(check: RuntimeCheck, pleg: Arc<pleg::Pleg>, stop: CancellationToken) {
    tokio::select! {
        () = stop.cancelled() => return,
        _ = timeout(SETTLE, pleg.listed()) => {}
    }
    check.run(stop).await;
}

fn start_pleg(
    base: &Base,
    connection: &CriClients,
    info: &RuntimeInfo,
    messages: Arc<logs::LogManager>,
) -> (Arc<pleg::Pleg>, mpsc::Receiver<pleg::ContainerDied>) {
    let mut hints: Vec<Arc<dyn pleg::EventHints>> = vec![Arc::new(pleg::CriEvents::new(connection.runtime.clone()))];
    if &*info.name == "containerd" {
        hints.push(Arc::new(pleg::ContainerdEvents::new(connection.runtime_channel())));
    }
    let (died, deaths) = mpsc::channel(DEATHS);
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
