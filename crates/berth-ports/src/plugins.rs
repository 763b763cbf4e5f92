//! Programs that register with this agent by a socket, and who takes them.

use std::{collections::BTreeMap, path::PathBuf};

use async_trait::async_trait;

/// What a plugin says of itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PluginInfo {
    /// Type: `CSIPlugin`, `DRAPlugin`, `DevicePlugin`.
    pub kind: String,
    /// Its name: of the driver, or of the resource.
    pub name: String,
    /// The socket it serves on.
    pub endpoint: PathBuf,
    /// Versions of its services, or their names.
    pub versions: Vec<String>,
    /// The socket it registered by.
    pub socket: PathBuf,
}

/// Takes plugins of one type. Calls for one socket come one after the other; sockets do not wait for each
/// other. Errors are texts, because the plugin is told them (spec 06c §2).
#[async_trait]
pub trait PluginHandler: Send + Sync + 'static {
    /// Whether the plugin can be taken.
    ///
    /// # Errors
    /// Why not.
    fn validate(&self, plugin: &PluginInfo) -> Result<(), String>;

    /// Takes it. Whatever fails leaves nothing behind.
    ///
    /// # Errors
    /// Why it was not taken.
    async fn register(&self, plugin: &PluginInfo) -> Result<(), String>;

    /// It is gone, or another one stands in its place.
    async fn deregister(&self, plugin: &PluginInfo);
}

/// What a storage driver says of this node.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct NodeDriver {
    /// The driver.
    pub name: String,
    /// What it calls this node.
    pub node_id: String,
    /// Where the node is, for the driver.
    pub topology: BTreeMap<String, String>,
    /// How many volumes the node takes; 0 for no limit, below for nonsense.
    pub max_volumes: i64,
}

/// Keeps what the objects of this node say of its storage drivers (spec 07 §12.2). Each call has its deadline.
#[async_trait]
pub trait NodeDrivers: Send + Sync + 'static {
    /// Writes a driver into the node and its CSINode.
    ///
    /// # Errors
    /// It could not be written, or contradicts what stands there.
    async fn install(&self, driver: &NodeDriver) -> Result<(), String>;

    /// Writes how many volumes the node takes now, into the CSINode alone.
    ///
    /// # Errors
    /// It could not be written.
    async fn update(&self, driver: &NodeDriver) -> Result<(), String>;

    /// Takes a driver out of both; its labels stay.
    ///
    /// # Errors
    /// It could not be written.
    async fn uninstall(&self, name: &str) -> Result<(), String>;
}
