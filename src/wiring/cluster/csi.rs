//! CSI drivers: plugin registration, and the CSINode object (spec 07 §12).

use std::{collections::BTreeMap, path::Path, sync::Arc};

use super::{super::composition_root::Base, Cluster};
use crate::{
    node::CsiDrivers,
    plugins::{Handlers, Watcher, WatcherDeps},
};
use berth_config::LoadedConfig;
use berth_metrics::{CsiMetrics, PluginMetrics};
use berth_ports::PluginHandler;
use berth_volumes::csi::{Csi, CsiDeps, DriverRegistration, Drivers, DriversDeps};

impl Cluster {
    /// Starts the registration of drivers; returns the volume plugin that mounts through them.
    pub(in crate::wiring) fn open_csi(&self, loaded: &LoadedConfig, base: &Base, root: &Path) -> Arc<Csi> {
        let node = CsiDrivers::new(self.api.clone(), &self.name);
        base.tasks.spawn(node.clone().follow(self.nodes.clone(), base.stop.child_token()));
        let drivers = Drivers::new(DriversDeps {
            node,
            objects: self.storage(),
            metrics: CsiMetrics::new(&base.registry),
            tasks: base.tasks.tracker().clone(),
            stop: base.stop.child_token(),
        });
        watch(
            base,
            root,
            BTreeMap::from([("CSIPlugin", Arc::new(DriverRegistration(drivers.clone())) as Arc<dyn PluginHandler>)]),
        );
        let deps = CsiDeps {
            drivers,
            objects: self.storage(),
            tokens: self.objects(),
            clock: base.clock.clone(),
            asks_health: loaded.gates.enabled("CSIVolumeHealth"),
        };
        Arc::new(Csi::new(root, &self.name, deps))
    }
}

/// Starts the plugin watcher: it registers drivers that create sockets in `plugins_registry`.
fn watch(base: &Base, root: &Path, handlers: BTreeMap<&'static str, Arc<dyn PluginHandler>>) {
    let watcher = Watcher::new(WatcherDeps {
        directory: root.join("plugins_registry"),
        handlers: Handlers::new(handlers),
        metrics: PluginMetrics::new(&base.registry),
        tasks: base.tasks.tracker().clone(),
    });
    base.tasks.spawn(watcher.run(base.stop.child_token()));
}
