//! The drivers that registered. Spec 07 §12.1.
//!
//! A driver is known once it said what it calls this node, and that was written: until then what waits for it waits.
//! A registration replaces an older one only when it succeeds.

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
    driver::Driver,
    limits,
    paths::safe,
    version::{Version, highest},
};
use berth_metrics::CsiMetrics;
use berth_ports::{NodeDriver, NodeDrivers, PluginHandler, PluginInfo, StorageObjects};
use berth_proto::csi::NodeGetInfoResponse;

/// The longest name that the API takes.
const LONGEST_NAME: usize = 63;

/// What the registry needs of others.
pub struct DriversDeps {
    /// Keeps what the node says of drivers.
    pub node: Arc<dyn NodeDrivers>,
    /// The drivers' objects.
    pub objects: Arc<dyn StorageObjects>,
    /// What is counted.
    pub metrics: CsiMetrics,
    /// Where tasks are counted.
    pub tasks: TaskTracker,
    /// Ends them.
    pub stop: CancellationToken,
}

/// The drivers.
pub struct Drivers {
    pub(super) deps: DriversDeps,
    known: Mutex<BTreeMap<String, Arc<Driver>>>,
    moved: watch::Sender<u64>,
}

impl Drivers {
    /// None yet.
    pub fn new(deps: DriversDeps) -> Arc<Self> {
        Arc::new(Self { deps, known: Mutex::default(), moved: watch::Sender::new(0) })
    }

    /// A driver.
    ///
    /// # Errors
    /// It is not registered.
    pub fn get(&self, name: &str) -> Result<Arc<Driver>, String> {
        let found = self.known().get(name).cloned();
        found.ok_or_else(|| format!("driver name {name} not found in the list of registered CSI drivers"))
    }

    /// Moves when a driver was registered.
    pub fn moved(&self) -> watch::Receiver<u64> {
        self.moved.subscribe()
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Driver>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The version to register with.
    fn version(&self, caller: &str, plugin: &PluginInfo) -> Result<Version, String> {
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

    /// Takes the driver's place among the known ones; what it replaces ends.
    fn admit(&self, driver: Arc<Driver>, plugin: &PluginInfo) -> Result<(), String> {
        // Another one of that name may have come meanwhile.
        self.version("RegisterPlugin", plugin)?;
        let before = self.known().insert(driver.name.clone(), driver);
        if let Some(before) = before {
            before.gone.cancel();
        }
        self.moved.send_modify(|count| *count = count.wrapping_add(1));
        Ok(())
    }

    /// Nothing is told of a driver that was refused, unless another of that name is there.
    fn never_was(&self, name: &str) {
        if !self.known().contains_key(name) {
            self.deps.metrics.forget(name);
        }
    }

    /// Takes what the node says of the driver back, unless another of that name is there.
    async fn withdraw(&self, name: &str) {
        if self.known().contains_key(name) {
            return;
        }
        if let Err(error) = self.deps.node.uninstall(name).await {
            warn!(driver = name, err = %error, "Failed to take the driver out of the objects of the node");
        }
    }
}

/// Names become those of directories and of objects.
fn named(name: &str) -> Result<(), String> {
    let is_good = safe(name).is_ok()
        && name.len() <= LONGEST_NAME
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_'));
    if is_good { Ok(()) } else { Err(format!("invalid driver name {name:?}")) }
}

/// Where it serves.
fn served_at(endpoint: &Path) -> Result<(), String> {
    if endpoint.is_absolute() {
        return Ok(());
    }
    Err(format!("the endpoint {:?} is no absolute path of a socket", endpoint.display().to_string()))
}

/// What the driver says of the node.
pub(super) fn on_node(name: &str, answer: NodeGetInfoResponse) -> NodeDriver {
    NodeDriver {
        name: name.to_owned(),
        node_id: answer.node_id,
        topology: answer.accessible_topology.unwrap_or_default().segments.into_iter().collect(),
        max_volumes: answer.max_volumes_per_node,
    }
}

/// Registers the drivers that announce themselves in the directory of plugins.
pub struct DriverRegistration(pub Arc<Drivers>);

#[async_trait]
impl PluginHandler for DriverRegistration {
    fn validate(&self, plugin: &PluginInfo) -> Result<(), String> {
        let PluginInfo { name, endpoint, .. } = plugin;
        let wrong = |error: String| {
            let endpoint = endpoint.display();
            format!("validation failed for CSI Driver {name} at endpoint {endpoint}: {error}")
        };
        named(name).and_then(|()| served_at(endpoint)).map_err(wrong)?;
        self.0.version("ValidatePlugin", plugin).map(drop).map_err(wrong)
    }

    async fn register(&self, plugin: &PluginInfo) -> Result<(), String> {
        let version = self.0.version("RegisterPlugin", plugin)?;
        let client = DriverClient::new(&plugin.name, plugin.endpoint.clone(), self.0.deps.metrics.clone());
        let driver = Arc::new(Driver::new(&plugin.name, plugin.socket.clone(), version, client));
        let answer = driver.client.node_info(deadline()).await.map_err(|error| error.to_string());
        let answer = answer.inspect_err(|_| self.0.never_was(&plugin.name))?;
        let installed = self.0.deps.node.install(&on_node(&plugin.name, answer)).await;
        if let Err(error) = installed.and_then(|()| self.0.admit(driver.clone(), plugin)) {
            self.0.withdraw(&plugin.name).await;
            self.0.never_was(&plugin.name);
            return Err(error);
        }
        info!(driver = %plugin.name, version = %driver.version, "Registered a CSI driver");
        self.0.deps.tasks.spawn(limits::follow(self.0.clone(), driver));
        Ok(())
    }

    async fn deregister(&self, plugin: &PluginInfo) {
        let gone = {
            let mut known = self.0.known();
            match known.get(&plugin.name) {
                Some(driver) if driver.socket == plugin.socket => known.remove(&plugin.name),
                // Another one took its place: what it left is that one's.
                _ => None,
            }
        };
        if let Some(driver) = gone {
            driver.gone.cancel();
            self.0.withdraw(&plugin.name).await;
        }
    }
}
