//! Topology hints of the device manager for a container or a pod. Pure. Spec 06c §1.5.
//!
//! Beyond the size up to which [`masks`] is complete (more than 16 NUMA nodes with devices), a resource has hints for
//! some masks only.

use std::{
    collections::{BTreeMap, BTreeSet},
    iter,
};

use super::{
    model::{Device, DeviceAssignment, DeviceId, Devices, NO_NODE},
    requests::{self, DeviceReuse},
    reusable_devices::ReusableDevices,
    state::ManagerState,
};
use crate::numa::{NumaMask, ProviderHints, TopologyHint, mask_combinations::masks};
use berth_types::{Pod, api};

/// Input of the hints for one resource.
struct DeviceHintInput<'a> {
    /// Number of devices requested.
    required: usize,
    /// Devices that the plugin reported.
    devices: &'a Devices,
    /// Devices that the container, or in scope `pod` the pod, already has; empty if none.
    assigned: &'a BTreeSet<DeviceId>,
    /// Devices assigned to any container, or reserved by an allocation in progress.
    in_use: &'a BTreeSet<DeviceId>,
    /// Devices of init containers of the pod, to be reused. Unhealthy ones are skipped, as in the allocation.
    reusable: &'a BTreeSet<DeviceId>,
    /// NUMA nodes of the machine.
    nodes: NumaMask,
}

/// Hints for one resource: `None` without preference, an empty list if there are too few devices.
fn hints(input: &DeviceHintInput<'_>) -> Option<Vec<TopologyHint>> {
    let DeviceHintInput { required, devices, assigned, in_use, reusable, .. } = *input;
    if !devices.values().any(has_topology) {
        return None;
    }
    if !assigned.is_empty() {
        let is_unchanged = assigned.len() == required;
        return Some(if is_unchanged { affine(input, assigned.iter(), iter::empty()) } else { Vec::new() });
    }
    let is_healthy = |id: &&DeviceId| devices.get(*id).is_some_and(|device| device.is_healthy);
    let reused = || reusable.iter().filter(is_healthy);
    let is_unused = |id: &&DeviceId| !in_use.contains(*id) && !reusable.contains(*id);
    let free = || devices.keys().filter(is_healthy).filter(is_unused);
    let is_enough = free().count() + reused().count() >= required;
    Some(if is_enough { affine(input, free(), reused()) } else { Vec::new() })
}

/// Masks that have `required` devices of `available` and `reused`, and a node of each reused device. Preferred are
/// those of the smallest size on which an idle machine has enough devices.
fn affine<'a>(
    input: &DeviceHintInput<'_>,
    available: impl Iterator<Item = &'a DeviceId>,
    reused: impl Iterator<Item = &'a DeviceId>,
) -> Vec<TopologyHint> {
    let DeviceHintInput { required, devices, nodes, .. } = *input;
    let with_topology = |id: &DeviceId| devices.get(id).filter(|device| has_topology(device));
    let available = NodeCounts::new(available.filter_map(with_topology), nodes);
    let reused = NodeCounts::new(reused.filter_map(with_topology), nodes);
    let existing = NodeCounts::new(devices.values(), nodes);
    let with_devices = existing.counts.keys().fold(NumaMask::default(), |nodes, mask| nodes.union(*mask));
    let candidates = if with_devices.is_empty() { nodes } else { with_devices };

    let mut smallest = u32::MAX;
    let mut hints = Vec::new();
    for mask in masks(candidates) {
        if existing.touching(mask) >= required {
            smallest = smallest.min(mask.len());
        }
        let has_reused = reused.touching(mask) == reused.total;
        if has_reused && reused.total + available.touching(mask) >= required {
            hints.push(mask);
        }
    }
    let hint = |mask: NumaMask| TopologyHint { mask: Some(mask), is_preferred: mask.len() == smallest };
    hints.into_iter().map(hint).collect()
}

/// Number of devices by the NUMA nodes that they are on. Many devices share few different sets of nodes.
struct NodeCounts {
    counts: BTreeMap<NumaMask, usize>,
    /// Number of all devices, also of those on no node of the machine.
    total: usize,
}

impl NodeCounts {
    fn new<'a>(devices: impl Iterator<Item = &'a Device>, nodes: NumaMask) -> Self {
        let mut counts = Self { counts: BTreeMap::new(), total: 0 };
        for device in devices {
            let ids = device.nodes.iter().filter_map(|node| u32::try_from(*node).ok());
            let mask = ids.collect::<NumaMask>().intersection(nodes);
            *counts.counts.entry(mask).or_default() += 1;
            counts.total += 1;
        }
        counts
    }

    /// Number of devices that are on at least one node of `mask`.
    fn touching(&self, mask: NumaMask) -> usize {
        let counts = self.counts.iter().filter(|(nodes, _)| !nodes.intersection(mask).is_empty());
        counts.map(|(_, count)| count).sum()
    }
}

/// Whether the plugin reported a NUMA node; some plugins report node -1 for a device without.
fn has_topology(device: &Device) -> bool {
    device.nodes.iter().any(|node| *node != NO_NODE)
}

impl ManagerState {
    /// Hints for the device resources that a container requests. `reusable` are those of earlier init containers.
    pub fn container_hints(
        &self,
        pod: &Pod,
        container: &api::Container,
        reusable: &ReusableDevices,
        nodes: NumaMask,
    ) -> ProviderHints {
        let hints_of = |(resource, required): (&str, usize)| {
            let assigned = self.assignment(pod.uid(), &container.name, resource).map(DeviceAssignment::ids);
            hints_for(self, resource, required, &assigned.unwrap_or_default(), &reusable.of(resource), nodes)
        };
        requests::limits(pod, container).filter_map(hints_of).collect()
    }

    /// Hints for the device resources that a pod requests, all containers together.
    pub fn pod_hints(&self, pod: &Pod, nodes: NumaMask) -> ProviderHints {
        let hints_of = |(resource, required): (&str, usize)| {
            let containers = self.assignments.get(pod.uid()).into_iter().flat_map(BTreeMap::values);
            let assigned: BTreeSet<DeviceId> =
                containers.filter_map(|container| container.get(resource)).flat_map(DeviceAssignment::ids).collect();
            hints_for(self, resource, required, &assigned, &BTreeSet::new(), nodes)
        };
        pod_requests(pod).into_iter().filter_map(hints_of).collect()
    }
}

/// Name and hints of one resource; `None` for a resource that no device plugin serves. A resource that is known only
/// from the checkpoint has no devices, so no preference.
fn hints_for(
    state: &ManagerState,
    resource: &str,
    required: usize,
    assigned: &BTreeSet<DeviceId>,
    reusable: &BTreeSet<DeviceId>,
    nodes: NumaMask,
) -> Option<(String, Option<Vec<TopologyHint>>)> {
    if !state.is_device_resource(resource) {
        return None;
    }
    let hints = state.inventory.get(resource).and_then(|entry| {
        let (devices, in_use) = (&entry.devices, state.in_use(resource));
        hints(&DeviceHintInput { required, devices, assigned, in_use: &in_use, reusable, nodes })
    });
    Some((resource.to_owned(), hints))
}

/// Devices that a pod needs at the same time, by resource: the sum of sidecars and regular containers, or, if larger,
/// that of an init container and the sidecars before it.
fn pod_requests(pod: &Pod) -> BTreeMap<&str, usize> {
    let mut requested: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for (container, reuse) in requests::containers(pod) {
        for (resource, number) in requests::limits(pod, container) {
            let (running, most) = requested.entry(resource).or_default();
            let needed = running.saturating_add(number);
            *most = needed.max(*most);
            if reuse == DeviceReuse::Keeps {
                *running = needed;
            }
        }
    }
    requested.into_iter().map(|(resource, (_, most))| (resource, most)).collect()
}

#[cfg(test)]
mod tests {
    use berth_types::PodUid;
    use serde_json::json;

    use super::*;
    use crate::devices::model::PluginOptions;

    /// Devices: IDs with `!` where unhealthy and `@` before each NUMA node.
    fn devices(listed: &str) -> Devices {
        let device = |text: &str| {
            let mut parts = text.split('@');
            let id = parts.next().expect("split yields one part");
            let nodes = parts.map(|node| node.parse().expect("a node")).collect();
            (DeviceId::from(id.trim_end_matches('!')), Device { is_healthy: !id.ends_with('!'), nodes })
        };
        listed.split_whitespace().map(device).collect()
    }

    fn ids(listed: &str) -> BTreeSet<DeviceId> {
        listed.split_whitespace().map(DeviceId::from).collect()
    }

    /// Hints as text: nodes with commas between them, `p` where preferred.
    fn text(hints: &[TopologyHint]) -> String {
        let hint = |hint: &TopologyHint| {
            let nodes = hint.mask.map_or_else(|| "-".to_owned(), |mask| mask.to_string());
            if hint.is_preferred { format!("{nodes}p") } else { nodes }
        };
        hints.iter().map(hint).collect::<Vec<_>>().join(" ")
    }

    /// Input of a row of a table: number, devices, and IDs of assigned, used, and reusable ones.
    struct Row(usize, &'static str, &'static str, &'static str, &'static str);

    impl Row {
        /// Hints on a machine with the nodes 0 to 2.
        fn hints(&self) -> Option<String> {
            let Self(required, listed, assigned, in_use, reusable) = *self;
            let input = DeviceHintInput {
                required,
                devices: &devices(listed),
                assigned: &ids(assigned),
                in_use: &ids(in_use),
                reusable: &ids(reusable),
                nodes: NumaMask::from_bits(0b111),
            };
            hints(&input).map(|hints| text(&hints))
        }
    }

    #[test]
    fn hints_follow_the_devices_that_are_available() {
        let four = "a@0 b@0 c@1 d@1";
        for (case, row, expected) in [
            ("no topology", Row(1, "a b", "", "", ""), None),
            ("node -1 is no topology", Row(1, "a@-1", "", "", ""), None),
            ("no device", Row(1, "", "", "", ""), None),
            ("no topology precedes too few", Row(2, "a", "", "", ""), None),
            ("one device", Row(1, four, "", "", ""), Some("0p 1p 0,1")),
            ("two devices", Row(2, four, "", "", ""), Some("0p 1p 0,1")),
            ("three devices", Row(3, four, "", "", ""), Some("0,1p")),
            ("used devices count for the smallest size", Row(2, four, "", "a c", ""), Some("0,1")),
            ("unhealthy devices count for the smallest size", Row(2, "a!@0 b@0 c@1", "", "", ""), Some("0,1")),
            ("a node is used up", Row(1, four, "", "a b", ""), Some("1p 0,1")),
            ("too few", Row(2, four, "", "a b c", ""), Some("")),
            ("too few healthy", Row(2, "a@0 b!@0", "", "", ""), Some("")),
            ("a device of two nodes", Row(1, "a@0@1 b@2", "", "b", ""), Some("0p 1p 0,1 0,2 1,2 0,1,2")),
            ("nodes without devices have no hints", Row(1, "a@2", "", "", ""), Some("2p")),
            ("devices without topology are on no node", Row(2, "a@0 b c@1", "", "", ""), Some("0,1p")),
            ("nodes that the machine lacks", Row(1, "a@0@7", "", "", ""), Some("0p")),
            ("only nodes that the machine lacks", Row(1, "a@7", "", "", ""), Some("")),
            ("assigned ones keep their nodes", Row(1, four, "c", "a b c d", ""), Some("1p 0,1")),
            ("assigned ones may be unhealthy", Row(1, "a@0 b!@1", "b", "b", ""), Some("1p 0,1")),
            ("assigned ones of another number", Row(2, four, "c", "c", ""), Some("")),
            ("assigned ones precede reusable ones", Row(1, four, "c", "a c", "a"), Some("1p 0,1")),
            ("reusable ones", Row(1, four, "", "a c", "c"), Some("1p 0,1")),
            ("reusable and available", Row(2, four, "", "a c", "c"), Some("1p 0,1")),
            ("all reusable ones", Row(1, four, "", "a c", "a c"), Some("0,1")),
            ("reusable ones that are unhealthy", Row(1, "a!@0 b@1", "", "a", "a"), Some("1p 0,1")),
            ("reusable ones without topology", Row(1, "a b@1", "", "a", "a"), Some("1p")),
        ] {
            assert_eq!(row.hints().as_deref(), expected, "{case}");
        }
    }

    #[test]
    fn a_pod_requests_what_its_containers_need_at_the_same_time() {
        let limits = |number: u32| json!({"limits": {"example.com/res": number.to_string()}});
        let container = |name: &str, number: u32| json!({"name": name, "resources": limits(number)});
        let sidecar =
            |name: &str, number: u32| json!({"name": name, "restartPolicy": "Always", "resources": limits(number)});
        for (case, init, regular, expected) in [
            ("regular containers", vec![], vec![container("a", 1), container("b", 2)], Some(3)),
            ("a larger init container", vec![container("i", 5)], vec![container("a", 2)], Some(5)),
            ("a smaller init container", vec![container("i", 1)], vec![container("a", 2)], Some(2)),
            ("a sidecar", vec![sidecar("s", 1)], vec![container("a", 2)], Some(3)),
            ("a sidecar before", vec![sidecar("s", 1), container("i", 3)], vec![container("a", 2)], Some(4)),
            ("a sidecar after", vec![container("i", 3), sidecar("s", 1)], vec![container("a", 2)], Some(3)),
            ("nothing", vec![], vec![json!({"name": "a"})], None),
        ] {
            let pod = pod(&init, &regular);
            assert_eq!(pod_requests(&pod).get("example.com/res").copied(), expected, "{case}");
        }
    }

    fn pod(init: &[serde_json::Value], regular: &[serde_json::Value]) -> Pod {
        let object = json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {"initContainers": init, "containers": regular},
        });
        Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
    }

    #[test]
    fn hints_of_containers_and_pods_come_from_the_state() {
        let container = |name: &str| {
            let limits = json!({"cpu": "1", "example.com/res": "1", "example.com/unknown": "1"});
            json!({"name": name, "resources": {"limits": limits}})
        };
        let pod = pod(&[container("i")], &[container("a"), container("b")]);
        let mut state = ManagerState::default();
        let registration = state.inventory.begin_registration();
        assert!(state.inventory.register("example.com/res", registration, PluginOptions::default()));
        let listed = devices("d0@0 d1@1");
        assert!(state.inventory.report("example.com/res", registration, listed.clone(), &BTreeSet::new()).is_some());
        let nodes = NumaMask::from_bits(0b111);
        let hints_of = |hints: ProviderHints| -> Vec<(String, Option<String>)> {
            hints.into_iter().map(|(resource, hints)| (resource, hints.map(|hints| text(&hints)))).collect()
        };
        let expected = |hints: &str| vec![("example.com/res".to_owned(), Some(hints.to_owned()))];

        let (init, regular) = (&pod.init_containers()[0], &pod.containers()[0]);
        let mut reusable = ReusableDevices::default();
        let hints = state.container_hints(&pod, init, &reusable, nodes);
        assert_eq!(hints_of(hints), expected("0p 1p 0,1"));
        assert_eq!(hints_of(state.pod_hints(&pod, nodes)), expected("0,1p"));

        let uid = PodUid::from("u");
        state.assign(&uid, "i", "example.com/res", DeviceAssignment::new(&ids("d1"), &listed, Vec::new()));
        assert_eq!(hints_of(state.container_hints(&pod, init, &reusable, nodes)), expected("1p 0,1"));
        assert_eq!(hints_of(state.container_hints(&pod, regular, &reusable, nodes)), expected("0p 0,1"));
        reusable.add(state.container_devices(&uid, "i"), DeviceReuse::Leaves);
        assert_eq!(hints_of(state.container_hints(&pod, regular, &reusable, nodes)), expected("1p 0,1"));
        // The pod has one device and requests two.
        assert_eq!(hints_of(state.pod_hints(&pod, nodes)), expected(""));
    }
}
