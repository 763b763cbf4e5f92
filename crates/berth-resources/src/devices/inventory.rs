//! Devices of all resources as their plugins report them, with registrations and capacity.
//!
//! Without IO. Implements spec 06c §1.3, §1.4.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::time::Instant;

use super::model::{Device, DeviceId, Devices, PluginOptions};
use berth_ports::DeviceCapacity;

/// How long the devices of a plugin that is gone are listed as capacity.
pub const GRACE: Duration = Duration::from_secs(5 * 60);

/// Number of a registration: only the newest one of a resource may report devices or disconnect.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Registration(u64);

/// Difference between two reports of a plugin.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceListChange {
    /// Whether anything differs, or this is the first report.
    pub is_changed: bool,
    /// Devices that became healthy or unhealthy; one that is gone is unhealthy.
    pub health: BTreeSet<DeviceId>,
}

/// Devices of one resource, and the plugin that reports them.
#[derive(Debug)]
pub struct ResourceDevices {
    /// Devices of the last report; empty before the first one.
    pub devices: Devices,
    /// Options of the plugin.
    pub options: PluginOptions,
    registration: Option<Registration>,
    /// When the plugin disconnected; `None` while it is connected.
    stopped_at: Option<Instant>,
    has_reported: bool,
}

impl ResourceDevices {
    /// Whether a plugin is connected.
    pub fn is_connected(&self) -> bool {
        self.stopped_at.is_none()
    }

    /// Whether a plugin has registered and reported its devices since the agent started.
    pub fn has_reported(&self) -> bool {
        self.has_reported
    }

    fn healthy(&self) -> impl Iterator<Item = &DeviceId> {
        self.devices.iter().filter(|(_, device)| device.is_healthy).map(|(id, _)| id)
    }
}

/// All resources by name.
#[derive(Debug, Default)]
pub struct Inventory {
    resources: BTreeMap<String, ResourceDevices>,
    /// Resources whose plugin is gone for longer than [`GRACE`]: the node reports 0 of them.
    dropped: BTreeSet<String>,
    last: Registration,
}

impl Inventory {
    /// Restores the names of resources from the checkpoint. Their plugins are disconnected since `now`, and are kept
    /// for
    /// `wait`, but at least for [`GRACE`].
    pub fn restored(names: impl IntoIterator<Item = String>, now: Instant, wait: Duration) -> Self {
        let stopped_at = now + wait.saturating_sub(GRACE);
        let disconnected = |name| {
            let entry = ResourceDevices {
                devices: Devices::new(),
                options: PluginOptions::default(),
                registration: None,
                stopped_at: Some(stopped_at),
                has_reported: false,
            };
            (name, entry)
        };
        Self { resources: names.into_iter().map(disconnected).collect(), ..Self::default() }
    }

    /// Begins a registration: of several for one resource the one that began last counts.
    pub fn begin_registration(&mut self) -> Registration {
        self.last = Registration(self.last.0.saturating_add(1));
        self.last
    }

    /// Registers a plugin in place of the resource's previous one. Known devices stay until its first report. Returns
    /// false if a registration that began later has completed.
    pub fn register(&mut self, resource: &str, registration: Registration, options: PluginOptions) -> bool {
        let current = self.resources.get(resource).and_then(|entry| entry.registration);
        if current.is_some_and(|current| current > registration) {
            return false;
        }
        self.dropped.remove(resource);
        let known = self.resources.remove(resource);
        let entry = ResourceDevices {
            devices: known.as_ref().map(|known| known.devices.clone()).unwrap_or_default(),
            options,
            registration: Some(registration),
            stopped_at: None,
            has_reported: known.is_some_and(|known| known.has_reported),
        };
        self.resources.insert(resource.to_owned(), entry);
        true
    }

    /// Replaces all devices of a resource. `assigned` are those that containers have: until the first report they count
    /// as healthy. `None` if a newer plugin has registered.
    pub fn report(
        &mut self,
        resource: &str,
        registration: Registration,
        devices: Devices,
        assigned: &BTreeSet<DeviceId>,
    ) -> Option<DeviceListChange> {
        let entry = self.current(resource, registration)?;
        let is_healthy = |devices: &Devices, id: &DeviceId| devices.get(id).is_some_and(|device| device.is_healthy);
        let was_healthy = |id: &DeviceId| match entry.has_reported {
            true => is_healthy(&entry.devices, id),
            false => assigned.contains(id),
        };
        let ids = entry.devices.keys().chain(devices.keys()).chain(assigned);
        let health = ids.filter(|id| was_healthy(id) != is_healthy(&devices, id)).cloned().collect();
        let is_changed = !entry.has_reported || entry.devices != devices;
        entry.devices = devices;
        entry.has_reported = true;
        Some(DeviceListChange { is_changed, health })
    }

    /// Marks all devices of a resource as unhealthy because its plugin is gone. Returns the devices that were healthy;
    /// `None` if a newer plugin has registered.
    pub fn disconnect(
        &mut self,
        resource: &str,
        registration: Registration,
        now: Instant,
    ) -> Option<BTreeSet<DeviceId>> {
        let entry = self.current(resource, registration)?;
        let changed = entry.healthy().cloned().collect();
        entry.devices.values_mut().for_each(|device| device.is_healthy = false);
        entry.registration = None;
        entry.stopped_at = Some(now);
        Some(changed)
    }

    fn current(&mut self, resource: &str, registration: Registration) -> Option<&mut ResourceDevices> {
        self.resources.get_mut(resource).filter(|entry| entry.registration == Some(registration))
    }

    /// Drops resources whose plugin is gone for longer than [`GRACE`]; returns their names.
    pub fn expire(&mut self, now: Instant) -> Vec<String> {
        let is_over = |entry: &ResourceDevices| entry.stopped_at.is_some_and(|at| now.duration_since(at) > GRACE);
        let over = self.resources.iter().filter(|(_, entry)| is_over(entry)).map(|(name, _)| name.clone());
        let over: Vec<String> = over.collect();
        for name in &over {
            self.resources.remove(name);
            self.dropped.insert(name.clone());
        }
        over
    }

    /// When [`Inventory::expire`] has something to drop next.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.resources.values().filter_map(|entry| entry.stopped_at).min().map(|at| at + GRACE)
    }

    /// A resource that a plugin has registered, or that the checkpoint names.
    pub fn get(&self, resource: &str) -> Option<&ResourceDevices> {
        self.resources.get(resource)
    }

    /// A device of the last report.
    pub fn device(&self, resource: &str, id: &DeviceId) -> Option<&Device> {
        self.resources.get(resource)?.devices.get(id)
    }

    /// All resources with their devices.
    pub fn resources(&self) -> impl Iterator<Item = (&str, &ResourceDevices)> {
        self.resources.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    /// Healthy devices by resource, as the checkpoint lists them.
    pub fn healthy(&self) -> BTreeMap<String, BTreeSet<DeviceId>> {
        self.resources.iter().map(|(name, entry)| (name.clone(), entry.healthy().cloned().collect())).collect()
    }

    /// Capacity by resource; zeros for dropped resources.
    pub fn capacity(&self) -> BTreeMap<String, DeviceCapacity> {
        let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        let of = |entry: &ResourceDevices| DeviceCapacity {
            capacity: count(entry.devices.len()),
            allocatable: count(entry.healthy().count()),
        };
        let dropped = self.dropped.iter().map(|name| (name.clone(), DeviceCapacity::default()));
        dropped.chain(self.resources.iter().map(|(name, entry)| (name.clone(), of(entry)))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: &str = "example.com/gpu";

    fn devices(list: &[(&str, bool)]) -> Devices {
        let device = |healthy: bool| Device { is_healthy: healthy, nodes: BTreeSet::new() };
        list.iter().map(|(id, healthy)| (DeviceId::from(*id), device(*healthy))).collect()
    }

    fn ids(list: &[&str]) -> BTreeSet<DeviceId> {
        list.iter().map(|id| DeviceId::from(*id)).collect()
    }

    fn register(inventory: &mut Inventory) -> Registration {
        let registration = inventory.begin_registration();
        assert!(inventory.register(GPU, registration, PluginOptions::default()));
        registration
    }

    fn report(inventory: &mut Inventory, by: Registration, devices: Devices) -> Option<BTreeSet<DeviceId>> {
        inventory.report(GPU, by, devices, &BTreeSet::new()).map(|change| change.health)
    }

    fn counts(inventory: &Inventory) -> Option<(u64, u64)> {
        inventory.capacity().get(GPU).map(|found| (found.capacity, found.allocatable))
    }

    #[tokio::test(start_paused = true)]
    async fn capacity_counts_all_devices_and_allocatable_the_healthy_ones() {
        // AC-06c-3
        let mut inventory = Inventory::default();
        let registration = register(&mut inventory);
        assert_eq!(counts(&inventory), Some((0, 0)));
        let changed = report(&mut inventory, registration, devices(&[("a", true), ("b", true), ("c", false)]));
        assert_eq!((changed, counts(&inventory)), (Some(ids(&["a", "b"])), Some((3, 2))));
        let changed = report(&mut inventory, registration, devices(&[("a", true), ("c", true)]));
        assert_eq!((changed, counts(&inventory)), (Some(ids(&["b", "c"])), Some((2, 2))));
    }

    #[tokio::test(start_paused = true)]
    async fn a_plugin_that_is_gone_keeps_its_capacity_for_five_minutes() {
        // AC-06c-4
        let mut inventory = Inventory::default();
        let registration = register(&mut inventory);
        let _ = report(&mut inventory, registration, devices(&[("a", true), ("b", false)]));
        let now = Instant::now();
        assert_eq!(inventory.disconnect(GPU, registration, now), Some(ids(&["a"])));
        assert_eq!(counts(&inventory), Some((2, 0)));
        assert_eq!(inventory.next_expiry(), Some(now + GRACE));
        assert!(inventory.expire(now + GRACE).is_empty());
        assert_eq!(inventory.expire(now + GRACE + Duration::from_millis(1)), [GPU]);
        assert_eq!((counts(&inventory), inventory.get(GPU).is_none()), (Some((0, 0)), true));
        let again = register(&mut inventory);
        let _ = report(&mut inventory, again, devices(&[("a", true)]));
        assert_eq!(counts(&inventory), Some((1, 1)));
    }

    #[tokio::test(start_paused = true)]
    async fn only_the_newest_registration_reports_and_disconnects() {
        let mut inventory = Inventory::default();
        let old = register(&mut inventory);
        let _ = report(&mut inventory, old, devices(&[("a", true)]));
        let new = register(&mut inventory);
        assert_eq!(counts(&inventory), Some((1, 1)), "known devices stay until the first report");
        assert_eq!(inventory.disconnect(GPU, old, Instant::now()), None);
        assert_eq!(report(&mut inventory, old, devices(&[])), None);
        assert_eq!(report(&mut inventory, new, devices(&[("a", true)])), Some(ids(&[])));
        assert!(inventory.get(GPU).is_some_and(ResourceDevices::is_connected));
    }

    #[tokio::test(start_paused = true)]
    async fn resources_of_the_checkpoint_are_known_without_devices() {
        let now = Instant::now();
        let mut inventory = Inventory::restored([GPU.to_owned()], now, GRACE * 2);
        assert_eq!(counts(&inventory), Some((0, 0)));
        assert!(inventory.get(GPU).is_some_and(|gpu| !gpu.has_reported() && !gpu.is_connected()));
        assert!(inventory.expire(now + GRACE * 2).is_empty());
        assert_eq!(inventory.expire(now + GRACE * 2 + Duration::from_secs(1)), [GPU]);
        assert_eq!(counts(&inventory), Some((0, 0)));
    }

    #[tokio::test(start_paused = true)]
    async fn assigned_devices_are_healthy_until_the_first_report() {
        let mut inventory = Inventory::restored([GPU.to_owned()], Instant::now(), GRACE);
        let registration = register(&mut inventory);
        let listed = devices(&[("a", true), ("b", false), ("free", true)]);
        let change = inventory.report(GPU, registration, listed.clone(), &ids(&["a", "b", "gone"]));
        assert_eq!(change, Some(DeviceListChange { is_changed: true, health: ids(&["b", "free", "gone"]) }));
        let change = inventory.report(GPU, registration, listed, &ids(&["a", "b", "gone"]));
        assert_eq!(change, Some(DeviceListChange { is_changed: false, health: ids(&[]) }));
    }

    #[tokio::test(start_paused = true)]
    async fn the_registration_that_began_last_counts() {
        let mut inventory = Inventory::default();
        let (slow, quick) = (inventory.begin_registration(), inventory.begin_registration());
        assert!(inventory.register(GPU, quick, PluginOptions::default()));
        assert!(!inventory.register(GPU, slow, PluginOptions::default()));
        assert_eq!(report(&mut inventory, slow, devices(&[("a", true)])), None);
        assert!(report(&mut inventory, quick, devices(&[("a", true)])).is_some());
    }
}
