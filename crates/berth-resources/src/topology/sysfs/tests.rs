//! Tests of topology discovery: machines of many kinds, broken files, and random contents.

use std::error::Error as _;

use proptest::{collection, prelude::*, sample};

use super::*;
use crate::topology::{
    fake_sysfs::FakeSysfs,
    machines::{machine, machine_a, machine_b, machine_c},
};

const GIB: u64 = 1 << 30;

/// Two sockets with 32 cores and 8 core complexes each, two threads per core, one NUMA node per socket. The IDs of the
/// caches have a gap between the sockets, as APIC IDs have.
fn amd_with_core_complexes() -> CpuTopology {
    let info = |core: u32| {
        let socket = core / 32;
        CpuInfo { node: socket, socket, core, uncore_cache: socket * 16 + core % 32 / 4 }
    };
    CpuTopology { cpus: (0..128).map(|cpu| (cpu, info(cpu % 64))).collect() }
}

fn discover(sysfs: &FakeSysfs) -> MachineTopology {
    read(sysfs.root()).expect("a topology")
}

/// CPUs with the IDs of node, socket, core, and uncore cache.
fn positions(topology: &MachineTopology) -> Vec<(u32, [u32; 4])> {
    let cpus = topology.cpus.cpus.iter();
    cpus.map(|(cpu, info)| (*cpu, [info.node, info.socket, info.core, info.uncore_cache])).collect()
}

#[test]
fn topologies_of_regular_machines_are_discovered() {
    for (name, topology) in [
        ("A", machine_a()),
        ("B, even CPUs on socket 0", machine_b()),
        ("C, two nodes per socket, cache of the socket", machine_c()),
        ("one CPU", machine(1, 1, 1, 1)),
        ("four threads per core", machine(2, 1, 3, 4)),
        ("36 NUMA nodes", machine(4, 9, 2, 1)),
        ("AMD", amd_with_core_complexes()),
    ] {
        let machine = discover(&FakeSysfs::of(&topology));
        assert_eq!(machine.cpus, topology, "{name}");
        let nodes: BTreeSet<u32> = topology.cpus.values().map(|info| info.node).collect();
        assert!(machine.nodes.keys().eq(&nodes), "{name}");
        assert!(machine.nodes.values().all(|node| node.memory == GIB), "{name}");
    }
    let amd = amd_with_core_complexes();
    assert_eq!((amd.num_uncore_caches(), amd.num_cpus()), (16, 128));
}

#[test]
fn all_facts_of_a_laptop_are_discovered() {
    let sysfs = FakeSysfs::empty();
    sysfs.online("0-7").node(0, "0-7", 16 << 20).distances(0, "10");
    sysfs.hugepages(0, 2048, 512).hugepages(0, 1 << 20, 0);
    // CPU 9 of the boot parameter does not exist.
    sysfs.write("sys/devices/system/cpu/isolated", "2,6,9\n");
    for cpu in 0..8 {
        let siblings = format!("{},{}", cpu % 4, cpu % 4 + 4);
        // The cache of the whole node is no uncore cache.
        sysfs.cpu(cpu, "0", &siblings).cache(cpu, 0, 2, &siblings, Some(cpu % 4)).cache(cpu, 1, 3, "0-7", Some(7));
    }
    let node = NumaNode {
        memory: 16 * GIB,
        hugepages: BTreeMap::from([(2 << 20, 512), (1 << 30, 0)]),
        distances: BTreeMap::from([(0, 10)]),
    };
    let isolated = CpuSet::parse("2,6").expect("a set");
    let nodes = BTreeMap::from([(0, node)]);
    assert_eq!(discover(&sysfs), MachineTopology { cpus: machine_a(), nodes, isolated });
}

#[test]
fn caches_with_equal_or_without_ids_are_kept_apart() {
    let topology = amd_with_core_complexes();
    let by_lowest_cpu: Vec<u32> = (0..128).map(|cpu| cpu % 64 / 4 * 4).collect();
    let caches =
        |sysfs: &FakeSysfs| -> Vec<u32> { discover(sysfs).cpus.cpus.values().map(|info| info.uncore_cache).collect() };
    let id = |cpu: u32| format!("sys/devices/system/cpu/cpu{cpu}/cache/index2/id");
    let is_second_complex = |cpu: u32| cpu % 64 / 4 == 1;

    let repeated_per_socket = FakeSysfs::of(&topology);
    let without_ids = FakeSysfs::of(&topology);
    let second_complex_without_id = FakeSysfs::of(&topology);
    for cpu in 0..128 {
        repeated_per_socket.write(&id(cpu), (cpu % 32 / 4).to_string());
        without_ids.remove(&id(cpu));
        if is_second_complex(cpu) {
            // Its lowest CPU is 4, which is the kernel's ID of the fifth complex.
            second_complex_without_id.remove(&id(cpu));
        }
    }
    assert_eq!(caches(&repeated_per_socket), by_lowest_cpu);
    assert_eq!(caches(&without_ids), by_lowest_cpu);
    assert_eq!(caches(&second_complex_without_id), by_lowest_cpu);
}

#[test]
fn cores_without_uncore_cache_have_the_socket_id() {
    // Low-power cores without a cache of level 3.
    let hybrid = FakeSysfs::empty();
    hybrid.online("0-3").node(0, "0-3", 1);
    for cpu in 0..4 {
        hybrid.cpu(cpu, "5", &cpu.to_string()).cache(cpu, 0, 2, &cpu.to_string(), Some(cpu));
    }
    hybrid.cache(0, 1, 3, "0-1", Some(3)).cache(1, 1, 3, "0-1", Some(3));
    // A list that lacks the CPU itself is malformed.
    hybrid.cache(3, 1, 3, "0-1", Some(3));
    let expected = [(0, [0, 5, 0, 3]), (1, [0, 5, 1, 3]), (2, [0, 5, 2, 5]), (3, [0, 5, 3, 5])];
    assert_eq!(positions(&discover(&hybrid)), expected);

    // The cache of level 3 is the node's; that of level 4 spans both nodes.
    let fourth_level = FakeSysfs::empty();
    fourth_level.online("0-3").node(0, "0-1", 1).node(1, "2-3", 1);
    for cpu in 0..4 {
        let shared = if cpu < 2 { "0-1" } else { "2-3" };
        fourth_level.cpu(cpu, "0", &cpu.to_string()).cache(cpu, 2, 3, shared, Some(cpu / 2));
        fourth_level.cache(cpu, 3, 4, "0-3", Some(9));
    }
    let expected = [(0, [0, 0, 0, 9]), (1, [0, 0, 1, 9]), (2, [1, 0, 2, 9]), (3, [1, 0, 3, 9])];
    assert_eq!(positions(&discover(&fourth_level)), expected);
}

/// Intel packages of two dies: the kernel lists the dies, and each has a cache of level 3.
#[test]
fn dies_of_a_package_have_caches_of_their_own() {
    for nodes in [1, 2] {
        let sysfs = FakeSysfs::empty();
        sysfs.online("0-7");
        for node in 0..nodes {
            sysfs.node(node, if nodes == 1 { "0-7" } else { ["0-3", "4-7"][usize::from(node > 0)] }, 1);
        }
        for cpu in 0..8_u32 {
            let die = cpu / 4;
            sysfs.cpu(cpu, "0", &cpu.to_string());
            sysfs.write(&format!("sys/devices/system/cpu/cpu{cpu}/topology/die_id"), die.to_string());
            sysfs.cache(cpu, 3, 3, ["0-3", "4-7"][usize::from(die > 0)], Some(die + 7));
        }
        // The cache of a die that is a NUMA node is no uncore cache.
        let cache = |cpu: u32| if nodes == 1 { cpu / 4 + 7 } else { 0 };
        let node = |cpu: u32| if nodes == 1 { 0 } else { cpu / 4 };
        let expected: Vec<(u32, [u32; 4])> = (0..8).map(|cpu| (cpu, [node(cpu), 0, cpu, cache(cpu)])).collect();
        assert_eq!(positions(&discover(&sysfs)), expected, "{nodes}");
    }
}

#[test]
fn arm_clusters_without_package_are_on_socket_0() {
    for (name, shared, caches) in [
        ("guest without caches", None, [0, 0]),
        ("cache per cluster, without IDs", Some(["0-3", "4-7"]), [0, 4]),
        ("cache of the node", Some(["0-7", "0-7"]), [0, 0]),
    ] {
        let sysfs = FakeSysfs::empty();
        sysfs.online("0-7").node(0, "0-7", 1);
        for cpu in 0..8_u32 {
            let cluster = usize::from(cpu >= 4);
            sysfs.cpu(cpu, "-1", &cpu.to_string());
            sysfs.write(&format!("sys/devices/system/cpu/cpu{cpu}/topology/cluster_id"), cluster.to_string());
            if let Some(shared) = shared {
                sysfs.cache(cpu, 3, 3, shared[cluster], None);
            }
        }
        let expected: Vec<(u32, [u32; 4])> =
            (0..8).map(|cpu| (cpu, [0, 0, cpu, caches[usize::from(cpu >= 4)]])).collect();
        assert_eq!(positions(&discover(&sysfs)), expected, "{name}");
    }
}

#[test]
fn nodes_without_cpus_or_memory_are_nodes() {
    let sysfs = FakeSysfs::empty();
    sysfs.online("0-3").node(0, "0-1", 1 << 20).node(1, "2-3", 0).node(4, "", 8 << 20);
    sysfs.distances(0, "10 20 30").distances(1, "20 10 40").distances(4, "30 40");
    let node = |memory, distances: &[(u32, u32)]| NumaNode {
        memory,
        hugepages: BTreeMap::new(),
        distances: distances.iter().copied().collect(),
    };
    let nodes = BTreeMap::from([
        (0, node(GIB, &[(0, 10), (1, 20), (4, 30)])),
        (1, node(0, &[(0, 20), (1, 10), (4, 40)])),
        // Two numbers for three nodes have no meaning.
        (4, node(8 * GIB, &[])),
    ]);
    assert_eq!(discover(&sysfs).nodes, nodes);
    assert_eq!(discover(&sysfs).cpus.num_nodes(), 2);
    sysfs.write("sys/devices/system/node/online", "0-1,4\n");
    assert_eq!(discover(&sysfs).nodes, nodes);
    // The distances are those of the online nodes, which are others than the directories.
    sysfs.write("sys/devices/system/node/online", "0,4\n");
    assert_eq!(discover(&sysfs).nodes[&4].distances, BTreeMap::from([(0, 30), (4, 40)]));
    assert!(discover(&sysfs).nodes[&0].distances.is_empty());
}

#[test]
fn offline_cpus_are_absent() {
    let sysfs = FakeSysfs::of(&machine_a());
    sysfs.online("0-2,4-7");
    let topology = discover(&sysfs);
    let expected = [
        (0, [0, 0, 0, 0]),
        (1, [0, 0, 1, 0]),
        (2, [0, 0, 2, 0]),
        (4, [0, 0, 0, 0]),
        (5, [0, 0, 1, 0]),
        (6, [0, 0, 2, 0]),
        (7, [0, 0, 7, 0]),
    ];
    assert_eq!(positions(&topology), expected);
    assert_eq!(online_cpus(sysfs.root()).expect("a set").to_string(), "0-2,4-7");
}

#[test]
fn online_cpus_come_from_the_directories_without_a_list() {
    let sysfs = FakeSysfs::of(&machine_a());
    sysfs.write("sys/devices/system/cpu/cpu3/online", "0\n").write("sys/devices/system/cpu/cpu5/online", "1\n");
    // Neither is a CPU.
    sysfs.write("sys/devices/system/cpu/cpufreq/boost", "1\n").write("sys/devices/system/cpu/cpu99999999/online", "1");
    let online = || online_cpus(sysfs.root()).expect("a set").to_string();
    assert_eq!(online(), "0-7");
    // Larger than any file of the kernel.
    let endless = format!("0{}", ",1".repeat(40_000));
    for unusable in ["", "\n", "all", "3-1", "0-99999999", endless.as_str()] {
        sysfs.write("sys/devices/system/cpu/online", unusable);
        assert_eq!(online(), "0-2,4-7", "{unusable:.20}");
    }
    sysfs.remove("sys/devices/system/cpu/online");
    assert_eq!(online(), "0-2,4-7");
}

#[test]
fn a_machine_without_cpus_or_with_too_many_nodes_is_an_error() {
    let sysfs = FakeSysfs::empty();
    let path = sysfs.root().join("sys/devices/system/cpu/online");
    for content in [None, Some("x")] {
        if let Some(content) = content {
            sysfs.online(content);
        }
        let error = read(sysfs.root()).expect_err("no CPU");
        assert_eq!(error.to_string(), format!("failed to read the online CPUs from {path:?}"));
        assert!(error.source().is_some());
    }

    let nodes = sysfs.root().join("sys/devices/system/node");
    sysfs.online("0").node(63, "0", 1).write("sys/devices/system/node/nodes/x", "");
    assert_eq!(positions(&discover(&sysfs)), [(0, [63, 0, 0, 0])]);
    let too_high = sysfs.node(64, "", 1);
    let error = read(too_high.root()).expect_err("too many nodes");
    let text = format!("NUMA node 64 of {nodes:?} is not supported: the highest node ID is 63");
    assert_eq!(error.to_string(), text);

    let absurd = FakeSysfs::of(&machine_a());
    absurd.write("sys/devices/system/node/node99999999999/cpulist", "0-7");
    assert!(read(absurd.root()).expect_err("no such node").to_string().contains("NUMA node 99999999999 of"));
}

#[test]
fn a_machine_without_numa_directories_is_node_0() {
    let sysfs = FakeSysfs::empty();
    sysfs.online("0-3").cpu(0, "0", "0-1").cpu(1, "0", "0-1").cpu(2, "1", "2-3").cpu(3, "1", "2-3");
    sysfs.write("proc/meminfo", "MemTotal:        2097152 kB\nMemFree:  1 kB\n");
    sysfs.write("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "4\n");
    let topology = discover(&sysfs);
    let expected = [(0, [0, 0, 0, 0]), (1, [0, 0, 0, 0]), (2, [0, 1, 2, 1]), (3, [0, 1, 2, 1])];
    assert_eq!(positions(&topology), expected);
    let hugepages = BTreeMap::from([(2 << 20, 4)]);
    let node = NumaNode { memory: 2 * GIB, hugepages, distances: BTreeMap::new() };
    assert_eq!(topology.nodes, BTreeMap::from([(0, node)]));
}

#[test]
fn broken_files_cost_only_their_own_facts() {
    let sysfs = FakeSysfs::empty();
    sysfs.online("0-7").node(1, "0-6", 1);
    // Of another socket than its sibling; a chain of lists; a list without the CPU itself.
    sysfs.cpu(0, "0", "0-1").cpu(1, "1", "0-1").cpu(2, "1", "1-2").cpu(3, "1", "2-3").cpu(4, "1", "0-1");
    // The newer name of the list of siblings; a missing directory; no NUMA node.
    sysfs.cpu(5, "1", "garbage").write("sys/devices/system/cpu/cpu5/topology/core_cpus_list", "4-5\n");
    sysfs.cpu(7, "99999999999", "0-7");
    sysfs.write("sys/devices/system/cpu/cpu0/cache/index3/level", "three");
    sysfs.write("sys/devices/system/cpu/isolated", "(null)\n");
    sysfs.write("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal: 99999999999999999999 kB\n");
    sysfs.distances(1, "10 far").write("sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages", "-4");
    sysfs.write("sys/devices/system/node/node1/hugepages/hugepages-bigkB/nr_hugepages", "4");
    let topology = discover(&sysfs);
    let expected = [
        (0, [1, 0, 0, 0]),
        (1, [1, 1, 1, 1]),
        (2, [1, 1, 1, 1]),
        (3, [1, 1, 1, 1]),
        (4, [1, 1, 4, 1]),
        (5, [1, 1, 4, 1]),
        (6, [1, 0, 6, 0]),
        (7, [0, 0, 7, 0]),
    ];
    assert_eq!(positions(&topology), expected);
    assert!(topology.isolated.is_empty());
    // CPU 7 is on node 0, which has no directory.
    assert_eq!(topology.nodes, BTreeMap::from([(0, NumaNode::default()), (1, NumaNode::default())]));
}

#[test]
fn the_link_names_the_node_of_a_cpu_that_several_nodes_list() {
    let sysfs = FakeSysfs::empty();
    sysfs.online("0-3").node(0, "0-3", 1).node(1, "0-3", 1);
    for (cpu, node) in [(1, 0), (2, 1), (3, 1)] {
        sysfs.write(&format!("sys/devices/system/cpu/cpu{cpu}/node{node}/cpulist"), "0-3");
    }
    let nodes: Vec<u32> = discover(&sysfs).cpus.cpus.values().map(|info| info.node).collect();
    assert_eq!(nodes, [0, 0, 1, 1]);
}

/// Files below `sys/devices/system` that random contents are written to.
const RANDOM_FILES: [&str; 24] = [
    "cpu/online",
    "cpu/isolated",
    "cpu/cpu0/topology/physical_package_id",
    "cpu/cpu0/topology/thread_siblings_list",
    "cpu/cpu0/cache/index0/level",
    "cpu/cpu0/cache/index0/shared_cpu_list",
    "cpu/cpu0/cache/index0/id",
    "cpu/cpu1/online",
    "cpu/cpu1/topology/physical_package_id",
    "cpu/cpu1/topology/thread_siblings_list",
    "cpu/cpu1/topology/core_cpus_list",
    "cpu/cpu1/cache/index0/level",
    "cpu/cpu1/cache/index0/shared_cpu_list",
    "cpu/cpu1/cache/index0/id",
    "cpu/cpu2/topology/thread_siblings_list",
    "cpu/cpu3/topology/thread_siblings_list",
    "node/online",
    "node/node0/cpulist",
    "node/node0/meminfo",
    "node/node0/distance",
    "node/node1/cpulist",
    "node/node1/meminfo",
    "node/node1/hugepages/hugepages-2048kB/nr_hugepages",
    "node/node63/cpulist",
];

fn random_content() -> impl Strategy<Value = Vec<u8>> {
    let plausible = [
        "",
        "\n",
        "0",
        "1",
        "3",
        "-1",
        "0-3",
        "0-1",
        "1,3",
        "0-70",
        "3-1",
        "0-99999999999",
        "4294967295",
        "10 20 30",
        "Node 0 MemTotal: 1 kB",
        "MemTotal: 18446744073709551615 kB",
    ];
    let plausible = sample::select(plausible.to_vec()).prop_map(|text| text.as_bytes().to_vec());
    prop_oneof![4 => plausible, 1 => collection::vec(any::<u8>(), 0..40)]
}

proptest! {
    #[test]
    fn random_files_give_a_consistent_topology_or_an_error(
        contents in collection::vec(proptest::option::weighted(0.8, random_content()), RANDOM_FILES.len()),
    ) {
        let sysfs = FakeSysfs::empty();
        for (path, content) in RANDOM_FILES.iter().zip(&contents) {
            if let Some(content) = content {
                sysfs.write(&format!("sys/devices/system/{path}"), content);
            }
        }
        if let Ok(machine) = read(sysfs.root()) {
            let cpus = &machine.cpus.cpus;
            prop_assert!(!cpus.is_empty());
            prop_assert!(machine.isolated.is_subset(&machine.cpus.all()));
            for (cpu, info) in cpus {
                prop_assert!(machine.nodes.contains_key(&info.node));
                // The lowest thread of the core names the core, and all threads of it are in the same place.
                prop_assert!(info.core <= *cpu);
                prop_assert_eq!(cpus.get(&info.core), Some(info));
            }
        }
    }
}
