//! State of the device manager: inventory, plugins, assignments, and allocations in progress. Without IO.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use tokio::task::AbortHandle;
use tokio_util::task::AbortOnDropHandle;

use super::{
    checkpoint::Checkpoint,
    inventory::{Inventory, Registration},
    model::{DeviceAssignment, DeviceId, PodAssignments},
    plugin_client::PluginClient,
    requests,
};
use berth_ports::AllocationRefusal;
use berth_types::{Pod, PodUid, api};

/// Connection to a registered plugin.
pub(super) struct ConnectedPlugin {
    pub client: PluginClient,
    pub registration: Registration,
    /// Reads the plugin's device list; ends when the plugin is replaced.
    pub watch: Option<AbortOnDropHandle<()>>,
}

/// Allocation of a pod's devices.
pub(super) enum PodAllocation {
    /// In progress; the number is unique.
    Running { number: u64, task: AbortHandle },
    /// Finished, not yet seen by admission.
    Finished(Result<(), AllocationRefusal>),
}

/// See the module documentation.
#[derive(Default)]
pub(super) struct ManagerState {
    pub inventory: Inventory,
    pub plugins: BTreeMap<String, ConnectedPlugin>,
    pub assignments: PodAssignments,
    /// Devices that allocations in progress have chosen, by resource.
    pub reserved: BTreeMap<String, BTreeSet<DeviceId>>,
    pub allocations: HashMap<PodUid, PodAllocation>,
    /// Number of the last allocation.
    pub last_allocation: u64,
}

impl ManagerState {
    /// Content of the checkpoint.
    pub fn checkpoint(&self) -> Checkpoint {
        Checkpoint { pods: self.assignments.clone(), registered: self.inventory.healthy() }
    }

    /// Whether the resource is served by a device plugin: one has registered, or a container has such devices.
    pub fn is_device_resource(&self, resource: &str) -> bool {
        let is_assigned =
            |pod: &BTreeMap<String, _>| pod.values().any(|c: &BTreeMap<String, _>| c.contains_key(resource));
        self.inventory.get(resource).is_some() || self.assignments.values().any(is_assigned)
    }

    /// Devices of one resource that a container has.
    pub fn assignment(&self, pod: &PodUid, container: &str, resource: &str) -> Option<&DeviceAssignment> {
        self.assignments.get(pod)?.get(container)?.get(resource)
    }

    /// Devices of a container by resource.
    pub fn container_devices(&self, pod: &PodUid, container: &str) -> BTreeMap<String, BTreeSet<DeviceId>> {
        let assignments = self.assignments.get(pod).and_then(|containers| containers.get(container));
        let ids = |(resource, assignment): (&String, &DeviceAssignment)| (resource.clone(), assignment.ids());
        assignments.into_iter().flatten().map(ids).collect()
    }

    /// Devices of a resource that containers have.
    pub fn assigned(&self, resource: &str) -> BTreeSet<DeviceId> {
        let containers = self.assignments.values().flat_map(BTreeMap::values);
        containers.filter_map(|container| container.get(resource)).flat_map(DeviceAssignment::ids).collect()
    }

    /// Devices of a resource that containers have or allocations in progress have chosen.
    pub fn in_use(&self, resource: &str) -> BTreeSet<DeviceId> {
        let mut devices = self.assigned(resource);
        devices.extend(self.reserved.get(resource).into_iter().flatten().cloned());
        devices
    }

    /// Whether this allocation of the pod is in progress: the pod was not released meanwhile.
    pub fn is_current(&self, pod: &PodUid, number: u64) -> bool {
        matches!(self.allocations.get(pod), Some(PodAllocation::Running { number: current, .. }) if *current == number)
    }

    /// Whether a container lacks devices that its pod's admission must allocate or refuse.
    pub fn needs_allocation(&self, pod: &Pod) -> bool {
        let lacks = |container: &api::Container| {
            requests::limits(pod, container).any(|(resource, required)| {
                self.is_device_resource(resource) && !self.is_satisfied(pod.uid(), &container.name, resource, required)
            })
        };
        requests::containers(pod).any(|(container, _)| lacks(container))
    }

    /// A resource that the pod requests, that the checkpoint names, and whose plugin has not reported its devices since
    /// the agent started.
    pub fn missing_plugin(&self, pod: &Pod) -> Option<String> {
        let mut resources = requests::containers(pod).flat_map(|(container, _)| requests::limits(pod, container));
        let is_missing = |resource: &str| self.inventory.get(resource).is_some_and(|entry| !entry.has_reported());
        resources.find(|(resource, _)| is_missing(resource)).map(|(resource, _)| resource.to_owned())
    }

    /// Whether a container has that many devices and all of them are healthy.
    fn is_satisfied(&self, pod: &PodUid, container: &str, resource: &str, required: usize) -> bool {
        let Some(assignment) = self.assignment(pod, container, resource) else { return false };
        let ids = assignment.ids();
        let is_healthy = |id| self.inventory.device(resource, id).is_some_and(|device| device.is_healthy);
        ids.len() == required && ids.iter().all(is_healthy)
    }

    /// Stores the devices of a container.
    pub fn assign(&mut self, pod: &PodUid, container: &str, resource: &str, assignment: DeviceAssignment) {
        let containers = self.assignments.entry(pod.clone()).or_default();
        containers.entry(container.to_owned()).or_default().insert(resource.to_owned(), assignment);
    }

    /// Removes all state of a pod; an allocation in progress is cancelled. Returns whether it had devices.
    pub fn release(&mut self, pod: &PodUid) -> bool {
        if let Some(PodAllocation::Running { task, .. }) = self.allocations.remove(pod) {
            task.abort();
        }
        self.assignments.remove(pod).is_some()
    }

    /// Releases the devices of all pods that are not active and not being allocated. Returns whether there were any.
    pub fn retain(&mut self, active: &HashSet<PodUid>, candidate: &PodUid) -> bool {
        let before = self.assignments.len();
        let allocations = &self.allocations;
        self.assignments.retain(|pod, _| active.contains(pod) || pod == candidate || allocations.contains_key(pod));
        self.assignments.len() != before
    }

    /// Pods that have one of these devices.
    pub fn pods_with(&self, resource: &str, devices: &BTreeSet<DeviceId>) -> Vec<PodUid> {
        let has = |pod: &BTreeMap<String, BTreeMap<String, DeviceAssignment>>| {
            let mut assignments = pod.values().filter_map(|container| container.get(resource));
            assignments.any(|assignment| assignment.by_node.values().flatten().any(|id| devices.contains(id)))
        };
        self.assignments.iter().filter(|(_, pod)| has(pod)).map(|(uid, _)| uid.clone()).collect()
    }
}
