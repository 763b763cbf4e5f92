//! Opens dynamic resource allocation: drivers, claims of pods, and the cleanup of ResourceSlices.

use std::sync::{Arc, OnceLock};

use super::{
    allocators::PodResync,
    cluster::Cluster,
    composition_root::{Base, BuildError, state_file, wrong},
};
use crate::standalone::NoStorage;
use berth_config::LoadedConfig;
use berth_metrics::DraMetrics;
use berth_ports::{PluginHandler, PodClaims, StorageObjects};
use berth_resources::dra::{
    DeviceReport, DraManager, DraManagerDeps, DriverRegistration, Drivers, DriversDeps, PodClaimPreparer,
};

/// Dynamic resource allocation, and what other parts use of it.
#[derive(Clone)]
pub(super) struct Claims {
    /// Port of the engine and of the runtime manager.
    pub(super) pods: Arc<dyn PodClaims>,
    pub(super) manager: Arc<DraManager>,
    drivers: Arc<Drivers>,
}

impl Claims {
    /// Handler of the plugin watcher for DRA drivers.
    pub(super) fn plugin_handler(&self) -> Arc<dyn PluginHandler> {
        Arc::new(DriverRegistration(self.drivers.clone()))
    }
}

/// Opens dynamic resource allocation. Without an API server no pod can have claims; drivers register all the same, and
/// release what the checkpoint of an earlier agent contains.
///
/// # Errors
/// The checkpoint cannot be read or decoded.
pub(super) async fn open(
    loaded: &LoadedConfig,
    base: &Base,
    resync: &PodResync,
    cluster: Option<&Cluster>,
) -> Result<Claims, BuildError> {
    let metrics = DraMetrics::new(&base.registry);
    let managed = Arc::new(OnceLock::<Arc<DraManager>>::new());
    let health_of = managed.clone();
    let on_gone: Arc<dyn Fn(String) + Send + Sync> = match cluster {
        Some(cluster) => Arc::new(cluster.slice_cleanup(base)),
        // There are no ResourceSlices.
        None => Arc::new(|_: String| {}),
    };
    let drivers = Drivers::new(DriversDeps {
        tasks: base.tasks.tracker().clone(),
        shutdown: base.stop.child_token(),
        metrics: metrics.clone(),
        on_health: Arc::new(move |driver: &str, reports: Option<Vec<DeviceReport>>| {
            if let Some(manager) = health_of.get() {
                manager.report_health(driver, reports);
            }
        }),
        on_gone,
    });
    let manager = DraManager::open(DraManagerDeps {
        file: state_file(loaded, "dra_manager_state"),
        health_file: state_file(loaded, "dra_health_state"),
        objects: cluster.map_or_else(|| Arc::new(NoStorage) as Arc<dyn StorageObjects>, Cluster::storage),
        drivers: drivers.clone(),
        metrics,
        reports_messages: loaded.gates.enabled("ResourceHealthStatusMessage"),
        on_health_change: resync.callback(),
        tasks: base.tasks.tracker().clone(),
        shutdown: base.stop.child_token(),
    })
    .await
    .map_err(wrong)?;
    // Set once, before any driver can register.
    let _ = managed.set(manager.clone());
    let pods = Arc::new(PodClaimPreparer(manager.clone()));
    Ok(Claims { pods, manager, drivers })
}
