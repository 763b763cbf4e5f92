//! Opens the device manager: its checkpoint, registration socket, and settings.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use serde::Deserialize;
use tokio::sync::watch;

use super::{
    allocators::PodResync,
    composition_root::{Base, BuildError},
};
use crate::node::status::DevicePluginResources;
use berth_metrics::DeviceMetrics;
use berth_ports::{DeviceCapacity, DiskStateFile, NodeFacts, PluginHandler, PodDevices};
use berth_resources::{
    devices::{
        DeviceManager, DeviceManagerConfig, DeviceManagerDeps, PluginRegistry, PodDeviceAllocator, serve_registration,
    },
    placement::PlacementManager,
};
use berth_types::{
    go_duration::GoDuration,
    quantity::{Amount, QuantityFormat},
};

/// Section `devices` of the agent's own settings (`/etc/berth/config.yaml`).
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct DeviceSettings {
    /// Directory of device plugins; as in kubelet it does not depend on `--root-dir`.
    plugin_directory: PathBuf,
    /// How long pods wait after a start for plugins that served this node before; `0s` refuses them at once, as kubelet
    /// does.
    registration_wait: GoDuration,
}

impl Default for DeviceSettings {
    fn default() -> Self {
        Self {
            plugin_directory: "/var/lib/kubelet/device-plugins".into(),
            registration_wait: Duration::from_secs(5 * 60).into(),
        }
    }
}

impl DeviceSettings {
    fn read() -> Result<Self, BuildError> {
        let Some(section) = berth_runtime::settings::section("devices").map_err(BuildError)? else {
            return Ok(Self::default());
        };
        Self::of(section).map_err(BuildError)
    }

    fn of(section: serde_json::Value) -> Result<Self, String> {
        serde_json::from_value(section).map_err(|error| format!("devices: {error}"))
    }
}

/// The device manager and what other parts use of it.
#[derive(Clone)]
pub(super) struct Devices {
    pub(super) manager: Arc<DeviceManager>,
    /// Port of the engine and of the runtime manager.
    pub(super) pods: Arc<dyn PodDevices>,
    /// Resources for the node status.
    pub(super) resources: watch::Receiver<Arc<DevicePluginResources>>,
    /// Whether there was no checkpoint: the node is new or was recreated.
    pub(super) is_fresh: bool,
    /// Why the registration server has failed; `None` while it works.
    pub(super) failure: watch::Receiver<Option<String>>,
}

impl Devices {
    /// Handler of the plugin watcher for device plugins.
    pub(super) fn plugin_handler(&self) -> Arc<dyn PluginHandler> {
        Arc::new(PluginRegistry(self.manager.clone()))
    }
}

/// Opens the device manager and starts its registration server. `facts` are those of a node without a cluster: it has
/// no node object from which they would get the device resources.
///
/// # Errors
/// Invalid settings.
pub(super) async fn open(
    base: &Base,
    resync: &PodResync,
    placement: Arc<PlacementManager>,
    facts: Option<watch::Sender<Arc<NodeFacts>>>,
) -> Result<Devices, BuildError> {
    let settings = DeviceSettings::read()?;
    let file = Arc::new(DiskStateFile::new(settings.plugin_directory.join("kubelet_internal_checkpoint")));
    let deps = DeviceManagerDeps {
        file,
        metrics: DeviceMetrics::new(&base.registry),
        on_health_change: resync.callback(),
        numa_nodes: placement.policies().topology.topology.nodes(),
        alignment: placement,
        tasks: base.tasks.tracker().clone(),
        shutdown: base.stop.child_token(),
    };
    let config = DeviceManagerConfig {
        directory: settings.plugin_directory.clone(),
        registration_wait: settings.registration_wait.std(),
    };
    let manager = DeviceManager::open(config, deps).await;
    let is_fresh = !manager.has_checkpoint();
    let registry = Arc::new(PluginRegistry(manager.clone()));
    let (failure, server) = serve_registration(settings.plugin_directory, registry, base.stop.child_token());
    base.tasks.spawn(server);
    let (published, resources) = watch::channel(Arc::default());
    base.tasks.spawn(publish_capacity(manager.capacity(), published, facts));
    let pods = Arc::new(PodDeviceAllocator(manager.clone()));
    Ok(Devices { manager, pods, resources, is_fresh, failure })
}

async fn publish_capacity(
    mut capacity: watch::Receiver<Arc<BTreeMap<String, DeviceCapacity>>>,
    published: watch::Sender<Arc<DevicePluginResources>>,
    facts: Option<watch::Sender<Arc<NodeFacts>>>,
) {
    loop {
        let current = capacity.borrow_and_update().clone();
        let resources = node_resources(&current);
        if let Some(facts) = &facts {
            facts.send_modify(|facts| {
                let facts = Arc::make_mut(facts);
                for (name, found) in &*current {
                    facts.capacity.insert(name.clone(), found.capacity.to_string());
                    facts.allocatable.insert(name.clone(), found.allocatable.to_string());
                }
            });
        }
        published.send_replace(Arc::new(resources));
        tokio::select! {
            () = published.closed() => return,
            changed = capacity.changed() => if changed.is_err() { return },
        }
    }
}

fn node_resources(capacity: &BTreeMap<String, DeviceCapacity>) -> DevicePluginResources {
    let amount = |number: u64| Amount::from_value(i64::try_from(number).unwrap_or(i64::MAX), QuantityFormat::DecimalSi);
    DevicePluginResources {
        capacity: capacity.iter().map(|(name, found)| (name.clone(), amount(found.capacity))).collect(),
        allocatable: capacity.iter().map(|(name, found)| (name.clone(), amount(found.allocatable))).collect(),
        removed: BTreeSet::new(),
    }
}
