//! CPU topologies of the machines A, B, and C of spec 06b §6, and of regular machines, for tests. Pure.

use super::model::{CpuInfo, CpuTopology};

/// Machine A: 8 CPUs, one socket, one NUMA node, siblings (i, i+4).
pub fn machine_a() -> CpuTopology {
    machine(1, 1, 4, 2)
}

/// Machine B: 12 CPUs, two sockets that are the NUMA nodes, even CPUs on socket 0, siblings (i, i+6).
pub fn machine_b() -> CpuTopology {
    let info = |cpu: u32| CpuInfo { node: cpu % 2, socket: cpu % 2, core: cpu % 6, uncore_cache: cpu % 2 };
    CpuTopology { cpus: (0..12).map(|cpu| (cpu, info(cpu))).collect() }
}

/// Machine C: 80 CPUs, two sockets, four NUMA nodes, siblings (i, i+40); node n has the CPUs 10n to 10n+9 and siblings.
pub fn machine_c() -> CpuTopology {
    machine(2, 2, 10, 2)
}

/// A regular machine, numbered as Linux does on most servers: the first threads of all cores, core by core, then the
/// second threads. The uncore cache is that of the socket.
pub fn machine(sockets: u32, nodes_per_socket: u32, cores_per_node: u32, threads: u32) -> CpuTopology {
    let cores = sockets * nodes_per_socket * cores_per_node;
    let info = |core: u32| {
        let node = core / cores_per_node;
        let socket = node / nodes_per_socket;
        CpuInfo { node, socket, core, uncore_cache: socket }
    };
    CpuTopology { cpus: (0..cores * threads).map(|cpu| (cpu, info(cpu % cores))).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_have_the_layout_of_the_specification() {
        for (name, topology, cpus, cores, sockets, nodes) in [
            ("A", machine_a(), 8, 4, 1, 1),
            ("B", machine_b(), 12, 6, 2, 2),
            ("C", machine_c(), 80, 40, 2, 4),
            ("4 sockets without SMT", machine(4, 1, 2, 1), 8, 8, 4, 4),
        ] {
            let counts = (topology.num_cpus(), topology.num_cores(), topology.num_sockets(), topology.num_nodes());
            assert_eq!(counts, (cpus, cores, sockets, nodes), "{name}");
            assert_eq!(topology.num_uncore_caches(), sockets, "{name}");
        }
        let list = |topology: &CpuTopology, node| topology.select(|info| info.node == node).to_string();
        assert_eq!(list(&machine_b(), 0), "0,2,4,6,8,10");
        assert_eq!(list(&machine_c(), 1), "10-19,50-59");
        assert_eq!(machine_a().select(|info| info.core == 1).to_string(), "1,5");
        assert_eq!(machine_c().select(|info| info.socket == 1).to_string(), "20-39,60-79");
    }
}
