//! Devices that init containers leave to later containers of their pod. Pure. Spec 06c §1.6.

use std::collections::{BTreeMap, BTreeSet};

use super::{model::DeviceId, requests::DeviceReuse};

/// Devices of one pod that later containers take first, by resource.
#[derive(Default)]
pub struct ReusableDevices(BTreeMap<String, BTreeSet<DeviceId>>);

impl ReusableDevices {
    /// Reusable devices of a resource.
    pub fn of(&self, resource: &str) -> BTreeSet<DeviceId> {
        self.0.get(resource).cloned().unwrap_or_default()
    }

    /// Accounts for the devices of the next container.
    pub fn add(&mut self, devices: BTreeMap<String, BTreeSet<DeviceId>>, reuse: DeviceReuse) {
        for (resource, ids) in devices {
            let reusable = self.0.entry(resource).or_default();
            match reuse {
                DeviceReuse::Leaves => reusable.extend(ids),
                DeviceReuse::Keeps => reusable.retain(|id| !ids.contains(id)),
            }
        }
    }
}
