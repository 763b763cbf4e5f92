//! [`TopologyMapSource`] adapter: CPUs and memory of this node, and the pods that have them.

use std::{collections::BTreeMap, sync::Arc};

use crate::engine::PodReader;
use berth_config::KubeletConfiguration;
use berth_resources::{
    memory::{MemoryBlock, NodeMemory},
    placement::{PlacementManager, PlacementPolicies, PlacementRefusal, PlacementSnapshot},
    topology::NumaNode,
};
use berth_server::ports::{
    CpuEntry, CpuUse, HugePagePool, ManagerPolicies, NumaNodeEntry, PinnedContainer, PinnedMemory, TopologyMap,
    TopologyMapSource, TopologyRefusal,
};
use berth_types::{
    CpuSet, PodRef, PodUid,
    resources::{MEMORY, page_size_of},
};

/// See the module documentation.
pub struct NodeTopology {
    /// CPU, memory, and topology managers.
    pub manager: Arc<PlacementManager>,
    /// Pods and their workers.
    pub pods: PodReader,
    /// Policies as configured, see [`configured_policies`].
    pub policies: ManagerPolicies,
}

impl TopologyMapSource for NodeTopology {
    fn topology(&self) -> TopologyMap {
        // Assignments first: a pod that is admitted in between is missing, not one without a name.
        let placement = self.manager.snapshot();
        let snapshot = self.pods.latest();
        let desired = snapshot.desired.iter().map(|pod| pod.id());
        let ids = snapshot.workers.iter().map(|worker| &worker.id).chain(desired);
        let pods: BTreeMap<&PodUid, &PodRef> = ids.map(|id| (&id.uid, id)).collect();
        map(&self.policies, self.manager.policies(), &placement, &pods)
    }
}

/// Policies and options of the CPU, memory, and topology managers in the kubelet configuration.
pub fn configured_policies(config: &KubeletConfiguration) -> ManagerPolicies {
    let options = config.cpu_manager_policy_options.iter().chain(&config.topology_manager_policy_options);
    ManagerPolicies {
        cpu: config.cpu_manager_policy.clone(),
        memory: config.memory_manager_policy.clone(),
        topology: config.topology_manager_policy.clone(),
        scope: config.topology_manager_scope.clone(),
        options: options.map(|(name, value)| (name.clone(), value.clone())).collect(),
    }
}

/// Joins the machine, the state of the managers, and the names of pods.
fn map(
    policies: &ManagerPolicies,
    node: &PlacementPolicies,
    placement: &PlacementSnapshot,
    pods: &BTreeMap<&PodUid, &PodRef>,
) -> TopologyMap {
    let reserved = node.cpu.as_ref().map(|policy| policy.reserved.cpus.clone()).unwrap_or_default();
    let cpus = cpu_entries(node, placement, &reserved);
    let nodes = node.machine.nodes.iter().map(|(id, machine)| {
        let memory = placement.memory.as_ref().and_then(|memory| memory.nodes.get(id));
        node_entry(*id, machine, memory, &cpus)
    });
    TopologyMap {
        policies: policies.clone(),
        shared: placement.shared.to_string(),
        reserved: reserved.to_string(),
        isolated: node.machine.isolated.to_string(),
        nodes: nodes.collect(),
        containers: pinned_containers(placement, pods),
        refusals: placement.refusals.iter().map(refusal).collect(),
        cpus,
    }
}

/// CPUs that were online at the start. One that is neither reserved nor in the shared pool is exclusive: also a CPU
/// that another agent has assigned to a pod as a whole, and one that went offline.
fn cpu_entries(node: &PlacementPolicies, placement: &PlacementSnapshot, reserved: &CpuSet) -> Vec<CpuEntry> {
    let assigned: CpuSet = placement.exclusive.values().flat_map(BTreeMap::values).flat_map(CpuSet::iter).collect();
    let usage = |cpu: u32| {
        if reserved.contains(cpu) {
            CpuUse::Reserved
        } else if placement.shared.contains(cpu) && !assigned.contains(cpu) {
            CpuUse::Shared
        } else {
            CpuUse::Exclusive
        }
    };
    let entries = node.machine.cpus.cpus.iter().map(|(cpu, info)| CpuEntry {
        cpu: *cpu,
        core: info.core,
        socket: info.socket,
        node: info.node,
        uncore_cache: info.uncore_cache,
        usage: usage(*cpu),
    });
    entries.collect()
}

/// A NUMA node; `memory` is `None` without the static policy of the memory manager.
fn node_entry(id: u32, machine: &NumaNode, memory: Option<&NodeMemory>, cpus: &[CpuEntry]) -> NumaNodeEntry {
    let cpus: CpuSet = cpus.iter().filter(|entry| entry.node == id).map(|entry| entry.cpu).collect();
    let table = memory.and_then(|memory| memory.tables.get(MEMORY));
    let pools = machine.hugepages.iter().map(|(page_size, total)| HugePagePool {
        page_size: *page_size,
        total: *total,
        free: memory.and_then(|memory| free_pages(memory, *page_size)),
    });
    NumaNodeEntry {
        id,
        cpus: cpus.to_string(),
        memory_bytes: machine.memory,
        allocatable_memory_bytes: table.map(|table| table.allocatable),
        free_memory_bytes: table.map(|table| table.free),
        hugepages: pools.collect(),
        distances: machine.distances.clone(),
    }
}

/// Number of free huge pages of a size in bytes.
fn free_pages(memory: &NodeMemory, page_size: u64) -> Option<u64> {
    let (_, table) = memory.tables.iter().find(|(resource, _)| page_size_of(resource) == Some(page_size))?;
    table.free.checked_div(page_size)
}

/// Containers with exclusive CPUs or reserved memory, sorted by namespace, pod, UID, and container.
fn pinned_containers(placement: &PlacementSnapshot, pods: &BTreeMap<&PodUid, &PodRef>) -> Vec<PinnedContainer> {
    let unpinned = |uid: &PodUid, container: &str| {
        let known = pods.get(uid);
        PinnedContainer {
            namespace: known.map(|known| known.namespace.to_string()).unwrap_or_default(),
            pod: known.map(|known| known.name.to_string()).unwrap_or_default(),
            uid: uid.to_string(),
            container: container.to_owned(),
            ..PinnedContainer::default()
        }
    };
    let mut entries: BTreeMap<(&PodUid, &str), PinnedContainer> = BTreeMap::new();
    for (uid, containers) in &placement.exclusive {
        for (name, cpus) in containers {
            let entry = entries.entry((uid, name.as_str())).or_insert_with(|| unpinned(uid, name));
            entry.cpus = cpus.to_string();
        }
    }
    for (uid, containers) in &placement.blocks {
        for (name, blocks) in containers.iter().filter(|(_, blocks)| !blocks.is_empty()) {
            let entry = entries.entry((uid, name.as_str())).or_insert_with(|| unpinned(uid, name));
            entry.memory = blocks.iter().map(pinned_memory).collect();
        }
    }
    let mut containers: Vec<PinnedContainer> = entries.into_values().collect();
    containers.sort_by(|a, b| (&a.namespace, &a.pod).cmp(&(&b.namespace, &b.pod)));
    containers
}

fn pinned_memory(block: &MemoryBlock) -> PinnedMemory {
    PinnedMemory { kind: block.resource.clone(), bytes: block.size, nodes: block.nodes.iter().map(i64::from).collect() }
}

fn refusal(refusal: &PlacementRefusal) -> TopologyRefusal {
    TopologyRefusal {
        namespace: refusal.pod.namespace.to_string(),
        pod: refusal.pod.name.to_string(),
        uid: refusal.pod.uid.to_string(),
        detail: refusal.detail.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_resources::{
        memory::{MachineState, NodeMemoryReservation},
        numa::NumaMask,
        placement::PlacementSettings,
        topology::{CpuInfo, CpuTopology, MachineTopology},
    };
    use berth_types::quantity::Amount;

    const GI: u64 = 1 << 30;
    const MI: u64 = 1 << 20;

    fn cpus(list: &str) -> CpuSet {
        CpuSet::parse(list).expect(list)
    }

    /// Six CPUs on two NUMA nodes with 8 GiB each; node 0 has eight huge pages of 2 MiB. CPU 5 is isolated.
    fn machine() -> MachineTopology {
        let info = |cpu: u32| CpuInfo { node: cpu / 3, socket: cpu / 3, core: cpu, uncore_cache: 7 };
        let node = |pages: u64| NumaNode {
            memory: 8 * GI,
            hugepages: BTreeMap::from([(2 * MI, pages)]),
            distances: BTreeMap::from([(0, 10), (1, 21)]),
        };
        MachineTopology {
            cpus: CpuTopology { cpus: (0..6).map(|cpu| (cpu, info(cpu))).collect() },
            nodes: BTreeMap::from([(0, node(8)), (1, node(0))]),
            isolated: cpus("5"),
        }
    }

    fn settings(cpu_policy: &str, memory_policy: &str) -> PlacementSettings {
        let amount = |text: &str| Amount::parse(text).expect(text);
        let reserved = || BTreeMap::from([("memory".to_owned(), amount("1Gi"))]);
        PlacementSettings {
            cpu_policy: cpu_policy.to_owned(),
            memory_policy: memory_policy.to_owned(),
            topology_policy: "none".to_owned(),
            topology_scope: "container".to_owned(),
            reserved: BTreeMap::from([("cpu".to_owned(), amount("1"))]),
            reserved_cpus: cpus("0"),
            not_allocatable: reserved(),
            reserved_memory: vec![NodeMemoryReservation { node: 0, amounts: reserved() }],
            ..PlacementSettings::default()
        }
    }

    fn policies(cpu_policy: &str, memory_policy: &str) -> PlacementPolicies {
        PlacementPolicies::new(&settings(cpu_policy, memory_policy), machine()).expect("correct settings")
    }

    fn block(resource: &str, size: u64) -> MemoryBlock {
        MemoryBlock { nodes: NumaMask::from_iter([0]), resource: resource.to_owned(), size }
    }

    /// Container `main` of the pod `u` with CPU 1 and memory, container `side` of an unknown pod with CPUs 3 and 4.
    fn placement(node: &PlacementPolicies) -> PlacementSnapshot {
        let blocks = vec![block("hugepages-2Mi", 6 * MI), block("memory", 2 * GI)];
        let reserved = node.memory.as_ref().expect("static");
        let mut memory = MachineState::initial(&node.machine, reserved);
        blocks.iter().for_each(|block| memory.take(block, block.size));
        let container = |name: &str, list: &str| BTreeMap::from([(name.to_owned(), cpus(list))]);
        PlacementSnapshot {
            shared: cpus("0,2,5"),
            exclusive: BTreeMap::from([("u".into(), container("main", "1")), ("a".into(), container("side", "3-4"))]),
            memory: Some(memory),
            blocks: BTreeMap::from([(
                "u".into(),
                BTreeMap::from([("main".to_owned(), blocks), ("idle".to_owned(), Vec::new())]),
            )]),
            refusals: vec![PlacementRefusal {
                pod: PodRef { uid: "r".into(), name: "large".into(), namespace: "n".into() },
                detail: "cpu: 4 CPUs on no node".to_owned(),
            }],
        }
    }

    fn uses(map: &TopologyMap) -> String {
        let letter = |entry: &CpuEntry| match entry.usage {
            CpuUse::Shared => 'S',
            CpuUse::Reserved => 'R',
            CpuUse::Exclusive => 'X',
        };
        map.cpus.iter().map(letter).collect()
    }

    #[test]
    fn the_map_joins_machine_assignments_and_pods() {
        let known = PodRef { uid: "u".into(), name: "web".into(), namespace: "n".into() };
        let pods = BTreeMap::from([(&known.uid, &known)]);
        let node = policies("static", "Static");
        let names = ManagerPolicies { cpu: "static".to_owned(), ..ManagerPolicies::default() };
        let map = map(&names, &node, &placement(&node), &pods);
        assert_eq!(map.policies, names);
        assert_eq!((map.shared.as_str(), map.reserved.as_str(), map.isolated.as_str()), ("0,2,5", "0", "5"));
        assert_eq!(uses(&map), "RXSXXS");
        let expected = CpuEntry { cpu: 4, core: 4, socket: 1, node: 1, uncore_cache: 7, usage: CpuUse::Exclusive };
        assert_eq!(map.cpus[4], expected);
        let entry = |id: u32, list: &str, allocatable: u64, free: u64, pages: (u64, u64)| NumaNodeEntry {
            id,
            cpus: list.to_owned(),
            memory_bytes: 8 * GI,
            allocatable_memory_bytes: Some(allocatable),
            free_memory_bytes: Some(free),
            hugepages: vec![HugePagePool { page_size: 2 * MI, total: pages.0, free: Some(pages.1) }],
            distances: BTreeMap::from([(0, 10), (1, 21)]),
        };
        // Huge pages and the reservation are not allocatable as memory.
        let (first, second) = (7 * GI - 16 * MI, 8 * GI);
        let nodes = [entry(0, "0-2", first, first - 2 * GI, (8, 5)), entry(1, "3-5", second, second, (0, 0))];
        assert_eq!(map.nodes, nodes);
        let memory = |kind: &str, bytes: u64| PinnedMemory { kind: kind.to_owned(), bytes, nodes: vec![0] };
        let container = |namespace: &str, pod: &str, uid: &str, name: &str, list: &str, memory: Vec<PinnedMemory>| {
            let [namespace, pod, uid, container, cpus] = [namespace, pod, uid, name, list].map(str::to_owned);
            PinnedContainer { namespace, pod, uid, container, cpus, memory }
        };
        let reserved = vec![memory("hugepages-2Mi", 6 * MI), memory("memory", 2 * GI)];
        let containers =
            [container("", "", "a", "side", "3-4", Vec::new()), container("n", "web", "u", "main", "1", reserved)];
        assert_eq!(map.containers, containers);
        let [namespace, pod, uid, detail] = ["n", "large", "r", "cpu: 4 CPUs on no node"].map(str::to_owned);
        assert_eq!(map.refusals, [TopologyRefusal { namespace, pod, uid, detail }]);
    }

    #[test]
    fn each_cpu_has_one_use() {
        for (name, cpu_policy, shared, exclusive, expected) in [
            ("policy none", "none", "0-5", "", "SSSSSS"),
            ("nothing is assigned", "static", "0-5", "", "RSSSSS"),
            ("strict reservation", "static", "1-5", "", "RSSSSS"),
            ("the shared pool is empty", "static", "", "1-5", "RXXXXX"),
            ("CPU 3 is offline", "static", "0-2,4-5", "", "RSSXSS"),
        ] {
            let exclusive = BTreeMap::from([("u".into(), BTreeMap::from([("c".to_owned(), cpus(exclusive))]))]);
            let placement = PlacementSnapshot { shared: cpus(shared), exclusive, ..PlacementSnapshot::default() };
            let node = policies(cpu_policy, "None");
            let map = map(&ManagerPolicies::default(), &node, &placement, &BTreeMap::new());
            assert_eq!(uses(&map), expected, "{name}");
            assert_eq!(map.reserved, if cpu_policy == "none" { "" } else { "0" }, "{name}");
        }
    }

    #[test]
    fn without_the_memory_manager_nothing_is_allocatable() {
        let node = policies("none", "None");
        let map = map(&ManagerPolicies::default(), &node, &PlacementSnapshot::default(), &BTreeMap::new());
        for entry in &map.nodes {
            assert_eq!(
                (entry.memory_bytes, entry.allocatable_memory_bytes, entry.free_memory_bytes),
                (8 * GI, None, None)
            );
            assert_eq!(entry.hugepages.iter().map(|pool| pool.free).collect::<Vec<_>>(), [None]);
        }
    }

    #[test]
    fn policies_are_those_of_the_configuration() {
        let mut config = berth_config::defaults::defaults();
        config.cpu_manager_policy = "static".to_owned();
        config.memory_manager_policy = "Static".to_owned();
        config.topology_manager_policy = "restricted".to_owned();
        config.topology_manager_scope = "pod".to_owned();
        config.cpu_manager_policy_options = BTreeMap::from([("full-pcpus-only".to_owned(), "true".to_owned())]);
        config.topology_manager_policy_options =
            BTreeMap::from([("prefer-closest-numa-nodes".to_owned(), "true".to_owned())]);
        let policies = configured_policies(&config);
        let names = [&policies.cpu, &policies.memory, &policies.topology, &policies.scope].map(String::as_str);
        assert_eq!(names, ["static", "Static", "restricted", "pod"]);
        let options: Vec<&str> = policies.options.keys().map(String::as_str).collect();
        assert_eq!(options, ["full-pcpus-only", "prefer-closest-numa-nodes"]);
    }
}
