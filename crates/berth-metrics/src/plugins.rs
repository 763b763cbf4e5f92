//! Metrics of plugins that register through a socket (spec 08 §4.9).

use prometheus::IntGaugeVec;

use super::{Registry, Stability::Alpha, World};

/// Metric handle of the plugin manager.
#[derive(Clone, Debug)]
pub struct PluginMetrics {
    totals: IntGaugeVec,
}

impl PluginMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let help = "Number of plugins in Plugin Manager";
        Self { totals: registry.gauges(Alpha, "plugin_manager_total_plugins", help, &["socket_path", "state"]) }
    }

    /// Adds a socket to the desired or the actual state of world.
    pub fn add(&self, socket: &str, world: World) {
        self.totals.with_label_values(&[socket, world.label()]).set(1);
    }

    /// Removes the series of a socket from the desired or the actual state of world.
    pub fn remove(&self, socket: &str, world: World) {
        // A socket that was never added has no series.
        let _ = self.totals.remove_label_values(&[socket, world.label()]);
    }
}
