//! Registry of CSI drivers: validation, registration, and deregistration.
//!
//! A driver becomes available once its `NodeGetInfo` response is written to the node's objects; volumes that need it
//! wait until then. A new registration replaces an older one only if it succeeds. Implements spec 07 §12.1.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use async_trait::async_trait;
use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{info, warn};

use super::{
    client::{DriverClient, deadline},
    driver::RegisteredDriver,
    limits,
    paths::safe,
    version::{CsiVersion, highest},
};
use berth_metrics::CsiMetrics;
use berth_ports::{NodeDriver, NodeDrivers, PluginHandler, PluginInfo, StorageObjects};
use berth_proto::csi::NodeGetInfoResponse;

/// Maximum length of a driver name in the API.
const LONGEST_NAME: usize = 63;

/// Dependencies of the registry.
pub struct DriversDeps {
    /// Writes the drivers' data to the node's objects.
    pub node: Arc<dyn NodeDrivers>,
    /// Access to `CSIDriver` objects.
    pub objects: Arc<dyn StorageObjects>,
    /// CSI metrics.
    pub metrics: CsiMetrics,
    /// Tracker of spawned tasks.
    pub tasks: TaskTracker,
    /// Stops all tasks.
    pub stop: CancellationToken,
}

/// Registered CSI drivers.
pub struct Drivers {
    pub(super) deps: DriversDeps,
    known: Mutex<BTreeMap<String, Arc<RegisteredDriver>>>,
    moved: watch::Sender<u64>,
}

impl Drivers {
    /// Creates an empty registry.
    pub fn new(deps: DriversDeps) -> Arc<Self> {
        Arc::new(Self { deps, known: Mutex::default(), moved: watch::Sender::new(0) })
    }

    /// Returns a registered driver.
    ///
    /// # Errors
    /// If no driver of that name is registered.
    pub fn get(&self, name: &str) -> Result<Arc<RegisteredDriver>, String> {
        let found = self.known().get(name).cloned();
        found.ok_or_else(|| format!("driver name {name} not found in the list of registered CSI drivers"))
    }

    /// Changes whenever a driver is registered.
    pub fn moved(&self) -> watch::Receiver<u64> {
        self.moved.subscribe()
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<String, Arc<RegisteredDriver>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the version to register with; fails if a driver of that name has at least that version.
    fn version(&self, caller: &str, plugin: &PluginInfo) -> Result<CsiVersion, String> {
        let PluginInfo { name, versions, .. } = plugin;
        let failed = |text: String| Err(format!("kubernetes.io/csi: {caller} for CSI driver {name:?} failed. {text}"));
        if versions.is_empty() {
            return failed("Plugin returned an empty list for supported versions".to_owned());
        }
        let version = match highest(versions) {
            Ok(version) => version,
            Err(error) => {
                return failed(format!("None of the versions specified {versions:?} are supported. err={error}"));
            }
        };
        match self.known().get(name) {
            Some(known) if known.version >= version => failed(format!(
                "Another driver with the same name is already registered with a higher supported version: {:?}",
                known.version.to_string()
            )),
            _ => Ok(version),
        }
    }

    /// Adds the driver to the registry and ends the registration that it replaces.
    fn admit(&self, driver: Arc<RegisteredDriver>, plugin: &PluginInfo) -> Result<(), String> {
        // Another driver of that name may have registered meanwhile.
        self.version("RegisterPlugin", plugin)?;
        let before = self.known().insert(driver.name.clone(), driver);
        if let Some(before) = before {
            before.gone.cancel();
        }
        self.moved.send_modify(|count| *count = count.wrapping_add(1));
        Ok(())
    }

    /// Removes the metrics of a rejected driver, unless another driver of that name is registered.
    fn forget_metrics(&self, name: &str) {
        if !self.known().contains_key(name) {
            self.deps.metrics.forget(name);
        }
    }

    /// Removes the driver from the node's objects, unless another driver of that name is registered.
    async fn withdraw(&self, name: &str) {
        if self.known().contains_key(name) {
            return;
        }
        if let Err(error) = self.deps.node.uninstall(name).await {
            warn!(driver = name, err = %error, "Failed to remove CSI driver from CSINode and Node");
        }
    }
}

/// Validates a driver name, which becomes part of paths and objects.
fn check_name(name: &str) -> Result<(), String> {
    let is_good = safe(name).is_ok()
        && name.len() <= LONGEST_NAME
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_'));
    if is_good { Ok(()) } else { Err(format!("invalid driver name {name:?}")) }
}

/// Validates the endpoint.
fn check_endpoint(endpoint: &Path) -> Result<(), String> {
    if endpoint.is_absolute() {
        return Ok(());
    }
    Err(format!("invalid endpoint {:?}: must be the absolute path of a socket", endpoint.display().to_string()))
}

/// Converts the driver's response to its entry in the node's objects.
pub(super) fn on_node(name: &str, answer: NodeGetInfoResponse) -> NodeDriver {
    NodeDriver {
        name: name.to_owned(),
        node_id: answer.node_id,
        topology: answer.accessible_topology.unwrap_or_default().segments.into_iter().collect(),
        max_volumes: answer.max_volumes_per_node,
    }
}

/// Plugin handler that registers CSI drivers announced in the plugin directory.
pub struct DriverRegistration(pub Arc<Drivers>);

#[async_trait]
impl PluginHandler for DriverRegistration {
    fn validate(&self, plugin: &PluginInfo) -> Result<(), String> {
        let PluginInfo { name, endpoint, .. } = plugin;
        let wrong = |error: String| {
            let endpoint = endpoint.display();
            format!("validation failed for CSI Driver {name} at endpoint {endpoint}: {error}")
        };
        check_name(name).and_then(|()| check_endpoint(endpoint)).map_err(wrong)?;
        self.0.version("ValidatePlugin", plugin).map(drop).map_err(wrong)
    }

    async fn register(&self, plugin: &PluginInfo) -> Result<(), String> {
        let version = self.0.version("RegisterPlugin", plugin)?;
        let client = DriverClient::new(&plugin.name, plugin.endpoint.clone(), self.0.deps.metrics.clone());
        let driver = Arc::new(RegisteredDriver::new(&plugin.name, plugin.socket.clone(), version, client));
        let answer = driver.client.node_info(deadline()).await.map_err(|error| error.to_string());
        let answer = answer.inspect_err(|_| self.0.forget_metrics(&plugin.name))?;
        let installed = self.0.deps.node.install(&on_node(&plugin.name, answer)).await;
        if let Err(error) = installed.and_then(|()| self.0.admit(driver.clone(), plugin)) {
            self.0.withdraw(&plugin.name).await;
            self.0.forget_metrics(&plugin.name);
            return Err(error);
        }
        info!(driver = %plugin.name, version = %driver.version, "Registered CSI driver");
        self.0.deps.tasks.spawn(limits::follow(self.0.clone(), driver));
        Ok(())
    }

    async fn deregister(&self, plugin: &PluginInfo) {
        let gone = {
            let mut known = self.0.known();
            match known.get(&plugin.name) {
                Some(driver) if driver.socket == plugin.socket => known.remove(&plugin.name),
                // Another registration replaced this one and owns its entries.
                _ => None,
            }
        };
        if let Some(driver) = gone {
            driver.gone.cancel();
            self.0.withdraw(&plugin.name).await;
        }
    }
}
