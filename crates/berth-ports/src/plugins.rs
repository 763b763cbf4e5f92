//! Port of plugin registration: plugins that register by a Unix socket, and their handlers.

use std::{collections::BTreeMap, path::PathBuf};

use async_trait::async_trait;

/// Registration data of a plugin.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PluginInfo {
    /// Plugin type: `CSIPlugin`, `DRAPlugin`, `DevicePlugin`.
    pub kind: String,
    /// Name of the driver or of the resource.
    pub name: String,
    /// Socket of the plugin's service.
    pub endpoint: PathBuf,
    /// Supported versions, or names of its services.
    pub versions: Vec<String>,
    /// Registration socket.
    pub socket: PathBuf,
}

/// Handles plugins of one type. Calls for one socket are sequential; sockets do not wait for each other. Errors are
/// texts because they are returned to the plugin (spec 06c §2).
#[async_trait]
pub trait PluginHandler: Send + Sync + 'static {
    /// Checks whether the plugin is acceptable.
    ///
    /// # Errors
    /// The reason for the rejection.
    fn validate(&self, plugin: &PluginInfo) -> Result<(), String>;

    /// Registers the plugin. A failure leaves no state behind.
    ///
    /// # Errors
    /// The reason for the failure.
    async fn register(&self, plugin: &PluginInfo) -> Result<(), String>;

    /// Removes a plugin that is gone or was replaced.
    async fn deregister(&self, plugin: &PluginInfo);
}

/// Node information reported by a CSI driver.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct NodeDriver {
    /// Driver name.
    pub name: String,
    /// The driver's id of this node.
    pub node_id: String,
    /// Topology segments of this node.
    pub topology: BTreeMap<String, String>,
    /// Maximum number of volumes; 0 for no limit, negative is invalid.
    pub max_volumes: i64,
}

/// Maintains the CSI drivers in the Node and CSINode objects (spec 07 §12.2). Each call has its own deadline.
#[async_trait]
pub trait NodeDrivers: Send + Sync + 'static {
    /// Adds a driver to the Node and its CSINode.
    ///
    /// # Errors
    /// If the write fails, or the driver conflicts with the existing entry.
    async fn install(&self, driver: &NodeDriver) -> Result<(), String>;

    /// Updates the volume limit in the CSINode only.
    ///
    /// # Errors
    /// If the write fails.
    async fn update(&self, driver: &NodeDriver) -> Result<(), String>;

    /// Removes a driver from both objects; its labels remain.
    ///
    /// # Errors
    /// If the write fails.
    async fn uninstall(&self, name: &str) -> Result<(), String>;
}
