//! Plugins that register by a socket (spec 08 §4.9).

use prometheus::IntGaugeVec;

use super::{Registry, Stability::Alpha, World};

/// Handles of what is counted of plugins.
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

    /// A socket is there to register, or registered.
    pub fn there(&self, socket: &str, world: World) {
        self.totals.with_label_values(&[socket, world.label()]).set(1);
    }

    /// It is not any more; its series goes.
    pub fn gone(&self, socket: &str, world: World) {
        // There is none where it never was there.
        let _ = self.totals.remove_label_values(&[socket, world.label()]);
    }
}
