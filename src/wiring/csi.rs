//! Opens the CSI volume plugin, and the registration of CSI drivers (spec 07 §12).

use std::{path::Path, sync::Arc};

use super::{
    cluster::Cluster,
    composition_root::{Base, CoreParts},
};
use crate::standalone::NoNodeObjects;
use berth_config::LoadedConfig;
use berth_metrics::CsiMetrics;
use berth_ports::{NodeDrivers, PluginHandler, StorageObjects};
use berth_volumes::csi::{Csi, CsiDeps, DriverRegistration, Drivers, DriversDeps};

/// Opens the volume plugin that mounts through CSI drivers, and the handler of their registration. Drivers register
/// without an API server too: volumes that an earlier agent mounted as a node of a cluster are unmounted, and the mount
/// of a new one fails because there is no CSIDriver object.
pub(super) fn open(
    loaded: &LoadedConfig,
    base: &Base,
    root: &Path,
    core: &CoreParts<'_>,
    cluster: Option<&Cluster>,
    objects: Arc<dyn StorageObjects>,
) -> (Arc<Csi>, Arc<dyn PluginHandler>) {
    let node: Arc<dyn NodeDrivers> = match cluster {
        Some(cluster) => cluster.node_drivers(base),
        None => Arc::new(NoNodeObjects),
    };
    let drivers = Drivers::new(DriversDeps {
        node,
        objects: objects.clone(),
        metrics: CsiMetrics::new(&base.registry),
        tasks: base.tasks.tracker().clone(),
        stop: base.stop.child_token(),
    });
    let registration = Arc::new(DriverRegistration(drivers.clone()));
    let deps = CsiDeps {
        drivers,
        objects,
        tokens: core.objects.clone(),
        clock: base.clock.clone(),
        asks_health: loaded.gates.enabled("CSIVolumeHealth"),
    };
    let node_name = core.node.borrow().name.clone();
    (Arc::new(Csi::new(root, &node_name, deps)), registration)
}
