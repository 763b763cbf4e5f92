//! CSI drivers: plugin registration, and the CSINode object (spec 07 §12).

use std::{path::Path, sync::Arc};

use super::{super::composition_root::Base, Cluster};
use crate::node::CsiDrivers;
use berth_config::LoadedConfig;
use berth_metrics::CsiMetrics;
use berth_ports::PluginHandler;
use berth_volumes::csi::{Csi, CsiDeps, DriverRegistration, Drivers, DriversDeps};

impl Cluster {
    /// Opens the volume plugin that mounts through CSI drivers, and the handler of their registration.
    pub(in crate::wiring) fn open_csi(
        &self,
        loaded: &LoadedConfig,
        base: &Base,
        root: &Path,
    ) -> (Arc<Csi>, Arc<dyn PluginHandler>) {
        let node = CsiDrivers::new(self.api.clone(), &self.name);
        base.tasks.spawn(node.clone().follow(self.nodes.clone(), base.stop.child_token()));
        let drivers = Drivers::new(DriversDeps {
            node,
            objects: self.storage(),
            metrics: CsiMetrics::new(&base.registry),
            tasks: base.tasks.tracker().clone(),
            stop: base.stop.child_token(),
        });
        let registration = Arc::new(DriverRegistration(drivers.clone()));
        let deps = CsiDeps {
            drivers,
            objects: self.storage(),
            tokens: self.objects(),
            clock: base.clock.clone(),
            asks_health: loaded.gates.enabled("CSIVolumeHealth"),
        };
        (Arc::new(Csi::new(root, &self.name, deps)), registration)
    }
}
