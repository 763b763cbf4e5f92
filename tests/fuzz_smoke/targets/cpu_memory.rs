//! Fuzz targets: state files of the CPU and memory managers, and their validation against a machine.

use std::{
    collections::{BTreeMap, HashSet},
    sync::LazyLock,
};

use berth_resources::{
    cpu::{InitialContainers, ReservedCpus, StaticOptions, StaticPolicy, checkpoint},
    memory::{MemoryCheckpoint, NodeMemoryReservation, ReservedMemory, StaticMemoryPolicy},
    topology::{CpuInfo, CpuTopology, MachineTopology, NumaNode},
};
use berth_types::{CpuSet, quantity::Amount, resources::Amounts};

/// Static policy on eight CPUs with the siblings (i, i+4), of which CPU 0 is reserved.
static CPU_POLICY: LazyLock<StaticPolicy> = LazyLock::new(|| {
    let info = |cpu: u32| CpuInfo { node: 0, socket: 0, core: cpu % 4, uncore_cache: 0 };
    StaticPolicy {
        topology: CpuTopology { cpus: (0..8).map(|cpu| (cpu, info(cpu))).collect() },
        reserved: ReservedCpus { cpus: CpuSet::from_iter([0]), whole_cores: CpuSet::from_iter([0, 4]) },
        options: StaticOptions::default(),
    }
});

/// Two NUMA nodes with 5 GiB of memory each, of which 1 GiB is reserved.
static MEMORY: LazyLock<(MachineTopology, ReservedMemory)> = LazyLock::new(|| {
    let amounts = |text: &str| Amounts::from([("memory".to_owned(), Amount::parse(text).expect(text))]);
    let node = || NumaNode { memory: 5 << 30, ..NumaNode::default() };
    let machine = MachineTopology { nodes: BTreeMap::from([(0, node()), (1, node())]), ..MachineTopology::default() };
    let configured = [0, 1].map(|node| NodeMemoryReservation { node, amounts: amounts("1Gi") });
    let reserved = ReservedMemory::new(&configured, &amounts("2Gi"), &machine).expect("a correct reservation");
    (machine, reserved)
});

/// `cpu_manager_state` in any format. Once all pods are gone, a state that fits the machine has all CPUs in the shared
/// pool.
pub fn cpu_manager_state(data: &[u8]) {
    let containers = InitialContainers::from([
        ("containerID1".into(), ("pod1".into(), "a".to_owned())),
        ("containerID2".into(), ("pod2".into(), "b".to_owned())),
    ]);
    for policy in ["none", "static"] {
        let Ok(mut state) = checkpoint::decode(data, policy, &containers) else { continue };
        let again = checkpoint::decode(&checkpoint::encode(policy, &state), policy, &InitialContainers::new());
        assert_eq!(again.as_ref(), Ok(&state), "written and read");
        if CPU_POLICY.initialize(&mut state).is_ok() {
            state.retain(&HashSet::new());
            assert_eq!(state.default, CPU_POLICY.topology.all());
        }
    }
}

/// `memory_manager_state` in any format. Once all pods are gone, no container has memory.
pub fn memory_manager_state(data: &[u8]) {
    let Ok(checkpoint) = MemoryCheckpoint::decode(data) else { return };
    assert_eq!(MemoryCheckpoint::decode(&checkpoint.encode()).as_ref(), Ok(&checkpoint), "written and read");
    let (machine, reserved) = &*MEMORY;
    if let Ok(mut policy) = StaticMemoryPolicy::restore(machine, reserved, checkpoint) {
        policy.retain(&HashSet::new());
        assert!(policy.checkpoint().assignments.values().all(BTreeMap::is_empty));
        drop(policy.allocatable());
    }
}
