//! CSI drivers in the Node and CSINode objects (spec 07 §12.2).

use std::sync::Arc;

use super::{super::composition_root::Base, Cluster};
use crate::node::CsiDrivers;
use berth_ports::NodeDrivers;

impl Cluster {
    /// Opens the publisher of CSI drivers, and starts its task.
    pub(in crate::wiring) fn node_drivers(&self, base: &Base) -> Arc<dyn NodeDrivers> {
        let drivers = CsiDrivers::new(self.api.clone(), &self.name);
        base.tasks.spawn(drivers.clone().follow(self.nodes.clone(), base.stop.child_token()));
        drivers
    }
}
