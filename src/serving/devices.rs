//! [`DeviceList`] adapter: devices and assignments of the device manager, with the names of their pods.

use std::{collections::BTreeMap, sync::Arc};

use crate::engine::PodReader;
use berth_resources::devices::{DeviceId, DeviceManager, DeviceOwner, ListedDevice};
use berth_server::ports::{AssignedContainer, DeviceEntry, DeviceHealth, DeviceList};
use berth_types::{PodRef, PodUid};

/// See the module documentation.
pub struct NodeDevices {
    /// Device manager.
    pub manager: Arc<DeviceManager>,
    /// Pods and their workers.
    pub pods: PodReader,
}

impl DeviceList for NodeDevices {
    fn devices(&self) -> Vec<DeviceEntry> {
        // Assignments first: a device that is assigned in between is listed as unassigned, not as one that is gone.
        let owners = self.manager.assignments();
        let snapshot = self.pods.latest();
        let desired = snapshot.desired.iter().map(|pod| pod.id());
        let ids = snapshot.workers.iter().map(|worker| &worker.id).chain(desired);
        let pods: BTreeMap<&PodUid, &PodRef> = ids.map(|id| (&id.uid, id)).collect();
        entries(self.manager.all_devices(), owners, &pods)
    }
}

/// Joins devices and their owners. An assigned device that no plugin lists is unhealthy.
fn entries(listed: Vec<ListedDevice>, owners: Vec<DeviceOwner>, pods: &BTreeMap<&PodUid, &PodRef>) -> Vec<DeviceEntry> {
    let mut entries: BTreeMap<(String, DeviceId), DeviceEntry> = BTreeMap::new();
    for ListedDevice { resource, id, nodes, is_healthy } in listed {
        let health = if is_healthy { DeviceHealth::Healthy } else { DeviceHealth::Unhealthy };
        let key = (resource.clone(), DeviceId::from(id.as_str()));
        entries.insert(key, DeviceEntry { resource, id, health, numa_nodes: nodes, assigned_to: Vec::new() });
    }
    for DeviceOwner { resource, id, pod, container } in owners {
        let entry = entries.entry((resource.clone(), id.clone())).or_insert_with(|| DeviceEntry {
            resource,
            id: id.to_string(),
            health: DeviceHealth::Unhealthy,
            numa_nodes: Vec::new(),
            assigned_to: Vec::new(),
        });
        let known = pods.get(&pod);
        entry.assigned_to.push(AssignedContainer {
            namespace: known.map(|known| known.namespace.to_string()).unwrap_or_default(),
            pod: known.map(|known| known.name.to_string()).unwrap_or_default(),
            uid: pod.to_string(),
            container,
        });
    }
    entries.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: &str = "example.com/gpu";

    fn listed(id: &str, nodes: &[i64], is_healthy: bool) -> ListedDevice {
        ListedDevice { resource: GPU.to_owned(), id: id.to_owned(), nodes: nodes.to_vec(), is_healthy }
    }

    fn owner(id: &str, pod: &str, container: &str) -> DeviceOwner {
        DeviceOwner { resource: GPU.to_owned(), id: id.into(), pod: pod.into(), container: container.to_owned() }
    }

    #[test]
    fn devices_are_listed_with_all_their_containers() {
        let known = PodRef { uid: "u".into(), name: "web".into(), namespace: "n".into() };
        let pods = BTreeMap::from([(&known.uid, &known)]);
        let devices = vec![listed("gpu10", &[], false), listed("gpu2", &[0, 1], true)];
        let owners = vec![owner("gpu3", "gone", "c"), owner("gpu2", "u", "init"), owner("gpu2", "u", "main")];
        let entry = |id: &str, health, numa_nodes: &[i64], assigned_to: &[(&str, &str, &str, &str)]| DeviceEntry {
            resource: GPU.to_owned(),
            id: id.to_owned(),
            health,
            numa_nodes: numa_nodes.to_vec(),
            assigned_to: (assigned_to.iter())
                .map(|(namespace, pod, uid, container)| AssignedContainer {
                    namespace: (*namespace).to_owned(),
                    pod: (*pod).to_owned(),
                    uid: (*uid).to_owned(),
                    container: (*container).to_owned(),
                })
                .collect(),
        };
        let expected = [
            entry("gpu2", DeviceHealth::Healthy, &[0, 1], &[("n", "web", "u", "init"), ("n", "web", "u", "main")]),
            entry("gpu3", DeviceHealth::Unhealthy, &[], &[("", "", "gone", "c")]),
            entry("gpu10", DeviceHealth::Unhealthy, &[], &[]),
        ];
        assert_eq!(entries(devices, owners, &pods), expected);
    }
}
