//! Devices, plugin options, and device assignments of containers. Pure. Spec 06c §1.2.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use berth_types::PodUid;

/// NUMA node under which an assignment lists devices without topology.
pub const NO_NODE: i64 = -1;

/// ID of a device, unique within its resource.
///
/// Ordered naturally: runs of digits compare as numbers, so `gpu2` precedes `gpu10`. The allocator takes the lowest
/// free ID, which makes its choice reproducible.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct DeviceId(Arc<str>);

impl DeviceId {
    /// The ID as the plugin reported it.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for DeviceId {
    fn from(id: &str) -> Self {
        Self(id.into())
    }
}

impl From<String> for DeviceId {
    fn from(id: String) -> Self {
        Self(id.into())
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Ord for DeviceId {
    fn cmp(&self, other: &Self) -> Ordering {
        compare_naturally(self.0.as_bytes(), other.0.as_bytes()).then_with(|| self.0.cmp(&other.0))
    }
}

impl PartialOrd for DeviceId {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Compares runs of digits by their value and all other bytes one by one.
fn compare_naturally(mut a: &[u8], mut b: &[u8]) -> Ordering {
    loop {
        let (digits_a, digits_b) = (leading_digits(a), leading_digits(b));
        if digits_a > 0 && digits_b > 0 {
            let (number_a, rest_a) = a.split_at(digits_a);
            let (number_b, rest_b) = b.split_at(digits_b);
            let (value_a, value_b) = (without_zeros(number_a), without_zeros(number_b));
            let order = value_a.len().cmp(&value_b.len()).then_with(|| value_a.cmp(value_b));
            if order != Ordering::Equal {
                return order;
            }
            (a, b) = (rest_a, rest_b);
            continue;
        }
        match (a.split_first(), b.split_first()) {
            (Some((x, rest_a)), Some((y, rest_b))) if x == y => (a, b) = (rest_a, rest_b),
            (x, y) => return x.map(|(byte, _)| byte).cmp(&y.map(|(byte, _)| byte)),
        }
    }
}

fn leading_digits(text: &[u8]) -> usize {
    text.iter().take_while(|byte| byte.is_ascii_digit()).count()
}

fn without_zeros(digits: &[u8]) -> &[u8] {
    let zeros = digits.iter().take_while(|digit| **digit == b'0').count();
    digits.get(zeros..).unwrap_or_default()
}

/// A device as its plugin reported it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Device {
    /// Whether the plugin reported it as `Healthy`.
    pub is_healthy: bool,
    /// NUMA nodes, ascending; empty without topology.
    pub nodes: BTreeSet<i64>,
}

/// Devices of one resource by ID.
pub type Devices = BTreeMap<DeviceId, Device>;

/// Options of a device plugin.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PluginOptions {
    /// Whether `PreStartContainer` is called before each start of a container.
    pub pre_start_required: bool,
    /// Whether the plugin implements `GetPreferredAllocation`.
    pub preferred_allocation: bool,
}

/// Devices of one resource that a container has.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeviceAssignment {
    /// IDs by NUMA node; a device of several nodes is listed under each, one without topology under [`NO_NODE`].
    pub by_node: BTreeMap<i64, BTreeSet<DeviceId>>,
    /// The encoded `ContainerAllocateResponse` of the plugin.
    pub response: Option<Vec<u8>>,
}

impl DeviceAssignment {
    /// Groups devices by their NUMA nodes. A device that is not in `devices` has no topology.
    pub fn new(ids: &BTreeSet<DeviceId>, devices: &Devices, response: Vec<u8>) -> Self {
        let mut by_node: BTreeMap<i64, BTreeSet<DeviceId>> = BTreeMap::new();
        for id in ids {
            let nodes = devices.get(id).map(|device| &device.nodes).filter(|nodes| !nodes.is_empty());
            match nodes {
                Some(nodes) => nodes.iter().for_each(|node| {
                    by_node.entry(*node).or_default().insert(id.clone());
                }),
                None => {
                    by_node.entry(NO_NODE).or_default().insert(id.clone());
                }
            }
        }
        Self { by_node, response: Some(response) }
    }

    /// All IDs, each once.
    pub fn ids(&self) -> BTreeSet<DeviceId> {
        self.by_node.values().flatten().cloned().collect()
    }
}

/// Assignments of one container by resource name.
pub type ContainerAssignments = BTreeMap<String, DeviceAssignment>;

/// Assignments of all pods by pod UID and container name.
pub type PodAssignments = BTreeMap<PodUid, BTreeMap<String, ContainerAssignments>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_ids_are_ordered_naturally() {
        let mut ids: Vec<DeviceId> =
            ["b", "gpu10", "gpu2", "gpu02", "a", "gpu", "10", "9", ""].map(DeviceId::from).into();
        ids.sort();
        let sorted: Vec<&str> = ids.iter().map(DeviceId::as_str).collect();
        assert_eq!(sorted, ["", "9", "10", "a", "b", "gpu", "gpu02", "gpu2", "gpu10"]);
    }

    #[test]
    fn an_assignment_lists_devices_under_each_of_their_nodes() {
        let device = |nodes: &[i64]| Device { is_healthy: true, nodes: nodes.iter().copied().collect() };
        let devices = Devices::from([("a".into(), device(&[0, 1])), ("b".into(), device(&[]))]);
        let ids = BTreeSet::from(["a".into(), "b".into(), "gone".into()]);
        let assignment = DeviceAssignment::new(&ids, &devices, vec![1]);
        let listed: Vec<(i64, Vec<&str>)> = (assignment.by_node.iter())
            .map(|(node, ids)| (*node, ids.iter().map(DeviceId::as_str).collect()))
            .collect();
        assert_eq!(listed, [(-1, vec!["b", "gone"]), (0, vec!["a"]), (1, vec!["a"])]);
        assert_eq!(assignment.ids(), ids);
    }
}
