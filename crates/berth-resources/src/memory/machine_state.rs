//! Memory of NUMA nodes: total, allocatable, reserved, and free bytes. Pure. Spec 06b §2.3.

use std::collections::BTreeMap;

use berth_types::{
    PodUid,
    quantity::{Amount, QuantityFormat},
    resources::{HUGEPAGES_PREFIX, MEMORY},
};

use super::reserved_memory::ReservedMemory;
use crate::{
    numa::NumaMask,
    topology::{MachineTopology, NumaNode},
};

/// Memory of one resource on one NUMA node, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MemoryTable {
    /// Size that the kernel reports.
    pub total: u64,
    /// Reserved for the system by the configuration, never allocatable.
    pub system_reserved: u64,
    /// Available to containers on an idle machine.
    pub allocatable: u64,
    /// Allocated to containers.
    pub reserved: u64,
    /// Allocatable and not reserved.
    pub free: u64,
}

/// Memory of one NUMA node.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct NodeMemory {
    /// Number of memory blocks of containers on this node.
    pub assignments: i64,
    /// By resource: `memory`, `hugepages-2Mi`, …
    pub tables: BTreeMap<String, MemoryTable>,
    /// Nodes that are allocated together with this one, itself included: `cells` in the checkpoint.
    pub group: NumaMask,
}

/// Memory of all NUMA nodes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MachineState {
    /// By node ID.
    pub nodes: BTreeMap<u32, NodeMemory>,
}

/// Memory of one resource that a container has on NUMA nodes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemoryBlock {
    /// IDs of the NUMA nodes: `numaAffinity` in the checkpoint.
    pub nodes: NumaMask,
    /// `memory`, `hugepages-2Mi`, …
    pub resource: String,
    /// Bytes on all nodes together.
    pub size: u64,
}

/// Memory blocks by pod UID and container name.
pub type MemoryAssignments = BTreeMap<PodUid, BTreeMap<String, Vec<MemoryBlock>>>;

impl MachineState {
    /// State of an idle machine.
    pub fn initial(topology: &MachineTopology, reserved: &ReservedMemory) -> Self {
        let nodes = topology.nodes.iter().map(|(id, node)| (*id, NodeMemory::initial(*id, node, reserved)));
        Self { nodes: nodes.collect() }
    }

    /// IDs of all nodes.
    pub fn all_nodes(&self) -> NumaMask {
        self.nodes.keys().copied().collect()
    }

    /// Free bytes of a resource on the nodes of a mask; 0 if they do not have it.
    pub fn free(&self, mask: NumaMask, resource: &str) -> u64 {
        self.sum(mask, resource, |table| table.free)
    }

    /// Allocatable bytes of a resource on the nodes of a mask; 0 if they do not have it.
    pub fn allocatable(&self, mask: NumaMask, resource: &str) -> u64 {
        self.sum(mask, resource, |table| table.allocatable)
    }

    /// Reserved bytes of a resource on the nodes of a mask; 0 if they do not have it.
    pub fn reserved(&self, mask: NumaMask, resource: &str) -> u64 {
        self.sum(mask, resource, |table| table.reserved)
    }

    /// Whether all nodes have a table of the resource.
    pub fn has_resource(&self, resource: &str) -> bool {
        self.nodes.values().all(|node| node.tables.contains_key(resource))
    }

    /// Whether this recorded state agrees with the one that follows from machine and assignments. Free and reserved
    /// bytes are compared per group: within a group they depend on the order of allocations.
    pub fn is_equivalent(&self, expected: &Self) -> bool {
        let is_same_node = |node: &NodeMemory, other: &NodeMemory| {
            let is_same_table = |resource: &str, table: &MemoryTable| {
                other.tables.get(resource).is_some_and(|other| table.has_same_size(other))
                    && self.free(node.group, resource) == expected.free(node.group, resource)
                    && self.reserved(node.group, resource) == expected.reserved(node.group, resource)
            };
            node.assignments == other.assignments
                && node.group == other.group
                && node.tables.len() == other.tables.len()
                && node.tables.iter().all(|(resource, table)| is_same_table(resource, table))
        };
        let has_same =
            |(id, node): (&u32, &NodeMemory)| expected.nodes.get(id).is_some_and(|other| is_same_node(node, other));
        self.nodes.len() == expected.nodes.len() && self.nodes.iter().all(has_same)
    }

    fn sum(&self, mask: NumaMask, resource: &str, bytes: impl Fn(&MemoryTable) -> u64) -> u64 {
        let tables = mask.iter().filter_map(|node| self.nodes.get(&node)?.tables.get(resource));
        tables.map(bytes).fold(0, u64::saturating_add)
    }
}

impl NodeMemory {
    /// Huge pages are a part of the node's memory that is not allocatable as such.
    fn initial(id: u32, node: &NumaNode, reserved: &ReservedMemory) -> Self {
        let mut tables = BTreeMap::new();
        let mut total_of_huge_pages: u64 = 0;
        for (page_size, pages) in &node.hugepages {
            let (resource, total) = (hugepages_resource(*page_size), page_size.saturating_mul(*pages));
            let system_reserved = reserved.bytes(id, &resource);
            let table = MemoryTable::initial(total, system_reserved, total.saturating_sub(system_reserved));
            tables.insert(resource, table);
            total_of_huge_pages = total_of_huge_pages.saturating_add(total);
        }
        let system_reserved = reserved.bytes(id, MEMORY);
        let allocatable = node.memory.saturating_sub(system_reserved).saturating_sub(total_of_huge_pages);
        tables.insert(MEMORY.to_owned(), MemoryTable::initial(node.memory, system_reserved, allocatable));
        Self { assignments: 0, tables, group: NumaMask::from_iter([id]) }
    }
}

impl MemoryTable {
    fn initial(total: u64, system_reserved: u64, allocatable: u64) -> Self {
        Self { total, system_reserved, allocatable, reserved: 0, free: allocatable }
    }

    fn has_same_size(&self, other: &Self) -> bool {
        let size = |table: &Self| (table.total, table.system_reserved, table.allocatable);
        size(self) == size(other)
    }
}

/// Resource of huge pages of a size in bytes, such as `hugepages-2Mi`.
fn hugepages_resource(page_size: u64) -> String {
    format!("{HUGEPAGES_PREFIX}{}", bytes_text(page_size))
}

/// Bytes as a Kubernetes quantity, such as `2Mi`.
pub fn bytes_text(bytes: u64) -> String {
    Amount::from_value(i64::try_from(bytes).unwrap_or(i64::MAX), QuantityFormat::BinarySi).canonical()
}

/// The amount in bytes; `None` if it is negative or not a whole number.
pub fn whole_bytes(amount: Amount) -> Option<u64> {
    let value = amount.value();
    let is_whole = Amount::from_value(value, QuantityFormat::BinarySi) == amount;
    u64::try_from(value).ok().filter(|_| is_whole)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::fixture::{GI, MI, mask, reserved, topology};

    fn table(total: u64, system_reserved: u64, allocatable: u64) -> MemoryTable {
        MemoryTable::initial(total, system_reserved, allocatable)
    }

    #[test]
    fn huge_pages_and_reservations_are_not_allocatable_as_memory() {
        let mut machine = topology(&[(4 * GI, 512), (2 * GI, 0)]);
        machine.nodes.get_mut(&0).expect("node 0").hugepages.extend([(GI, 1), (64 << 10, 16)]);
        let state = MachineState::initial(&machine, &reserved(&machine, "512Mi"));
        let first = &state.nodes[&0];
        assert_eq!((first.assignments, first.group), (0, mask(&[0])));
        let expected = [
            ("hugepages-1Gi", table(GI, 0, GI)),
            ("hugepages-2Mi", table(GI, 0, GI)),
            ("hugepages-64Ki", table(MI, 0, MI)),
            ("memory", table(4 * GI, 512 * MI, 4 * GI - 512 * MI - 2 * GI - MI)),
        ];
        let tables: Vec<(&str, MemoryTable)> =
            first.tables.iter().map(|(resource, table)| (resource.as_str(), *table)).collect();
        assert_eq!(tables, expected);
        let second = &state.nodes[&1];
        assert_eq!((second.group, second.tables["memory"]), (mask(&[1]), table(2 * GI, 0, 2 * GI)));
        assert_eq!(second.tables["hugepages-2Mi"], table(0, 0, 0));
        assert!(state.has_resource("hugepages-2Mi") && !state.has_resource("hugepages-1Gi"));
        // More is reserved than the node has.
        let small = topology(&[(GI, 0)]);
        let state = MachineState::initial(&small, &reserved(&small, "2Gi"));
        assert_eq!(state.nodes[&0].tables["memory"].allocatable, 0);
    }

    #[test]
    fn bytes_are_summed_over_the_nodes_that_exist() {
        let machine = topology(&[(4 * GI, 0), (2 * GI, 1)]);
        let state = MachineState::initial(&machine, &reserved(&machine, "1Gi"));
        let cases: [(&[u32], &str, u64); 5] = [
            (&[0], "memory", 3 * GI),
            (&[0, 1, 5], "memory", 5 * GI - 2 * MI),
            (&[0, 1], "hugepages-2Mi", 2 * MI),
            (&[0, 1], "hugepages-1Gi", 0),
            (&[], "memory", 0),
        ];
        for (nodes, resource, free) in cases {
            assert_eq!(state.free(mask(nodes), resource), free, "{nodes:?} {resource}");
            assert_eq!(state.allocatable(mask(nodes), resource), free, "{nodes:?} {resource}");
            assert_eq!(state.reserved(mask(nodes), resource), 0, "{nodes:?} {resource}");
        }
    }

    fn node(state: &mut MachineState, id: u32) -> &mut NodeMemory {
        state.nodes.get_mut(&id).expect("a node")
    }

    fn memory(state: &mut MachineState, id: u32) -> &mut MemoryTable {
        node(state, id).tables.get_mut(MEMORY).expect("a table")
    }

    /// Nodes 0 and 1 in one group, with this much memory reserved on each.
    fn group(reserved_bytes: [u64; 2]) -> MachineState {
        let machine = topology(&[(3 * GI, 0), (2 * GI, 0)]);
        let mut state = MachineState::initial(&machine, &reserved(&machine, "1Gi"));
        for (id, bytes) in (0..).zip(reserved_bytes) {
            (node(&mut state, id).assignments, node(&mut state, id).group) = (1, mask(&[0, 1]));
            memory(&mut state, id).reserved += bytes;
            memory(&mut state, id).free -= bytes;
        }
        state
    }

    #[test]
    fn states_are_compared_by_group() {
        let recorded = group([GI, 0]);
        let expected = group([GI / 2, GI / 2]);
        assert!(recorded != expected && recorded.is_equivalent(&expected) && expected.is_equivalent(&recorded));
        assert!(!recorded.is_equivalent(&group([GI, GI])));

        let changes: [fn(&mut MachineState); 9] = [
            |state| drop(state.nodes.remove(&1)),
            |state| drop(state.nodes.remove(&1).and_then(|node| state.nodes.insert(2, node))),
            |state| node(state, 0).assignments = 2,
            |state| node(state, 1).group = NumaMask::from_bits(2),
            |state| node(state, 0).tables.retain(|resource, _| resource != "hugepages-2Mi"),
            |state| memory(state, 0).total += 1,
            |state| memory(state, 0).system_reserved += 1,
            |state| memory(state, 0).allocatable += 1,
            |state| memory(state, 1).free -= 1,
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let mut other = expected.clone();
            change(&mut other);
            assert!(!recorded.is_equivalent(&other), "change {number}");
            assert!(!other.is_equivalent(&recorded), "change {number}");
        }
    }

    #[test]
    fn bytes_are_whole_numbers() {
        for (quantity, bytes) in [
            ("1Gi", Some(GI)),
            ("1.5Ki", Some(1536)),
            ("1000m", Some(1)),
            ("0", Some(0)),
            ("1500m", None),
            ("1n", None),
            ("-1", None),
        ] {
            assert_eq!(whole_bytes(Amount::parse(quantity).expect(quantity)), bytes, "{quantity}");
        }
        for (bytes, text) in [(2 * MI, "2Mi"), (GI, "1Gi"), (1536 * MI, "1536Mi"), (500, "500"), (0, "0")] {
            assert_eq!(bytes_text(bytes), text);
        }
    }
}
