//! Model of the machine's topology, as the resource managers use it. Pure. Spec 06b §1.1, §2.3.

use std::collections::BTreeMap;

use crate::numa::NumaMask;
use berth_types::CpuSet;

/// Position of a logical CPU.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CpuInfo {
    /// NUMA node ID.
    pub node: u32,
    /// Socket ID (physical package); 0 if the kernel knows none.
    pub socket: u32,
    /// Core ID: the lowest CPU among the hardware threads of the core.
    pub core: u32,
    /// Uncore cache ID: of the first cache of level 3 or higher that is not shared by the whole NUMA node; otherwise
    /// the socket ID.
    pub uncore_cache: u32,
}

/// Online CPUs and their positions.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CpuTopology {
    /// Position of each online CPU.
    pub cpus: BTreeMap<u32, CpuInfo>,
}

impl CpuTopology {
    /// All online CPUs.
    pub fn all(&self) -> CpuSet {
        self.cpus.keys().copied().collect()
    }

    /// Online CPUs of which `matches` holds.
    pub fn select(&self, matches: impl Fn(&CpuInfo) -> bool) -> CpuSet {
        self.cpus.iter().filter(|(_, info)| matches(info)).map(|(cpu, _)| *cpu).collect()
    }

    /// Number of online CPUs.
    pub fn num_cpus(&self) -> usize {
        self.cpus.len()
    }

    /// Number of cores that have an online CPU.
    pub fn num_cores(&self) -> usize {
        self.count(|info| info.core)
    }

    /// Number of sockets that have an online CPU.
    pub fn num_sockets(&self) -> usize {
        self.count(|info| info.socket)
    }

    /// Number of NUMA nodes that have CPUs.
    pub fn num_nodes(&self) -> usize {
        self.count(|info| info.node)
    }

    /// Number of uncore caches.
    #[cfg(test)]
    pub fn num_uncore_caches(&self) -> usize {
        self.count(|info| info.uncore_cache)
    }

    /// Hardware threads per core, rounded down; 0 without CPUs.
    pub fn cpus_per_core(&self) -> usize {
        self.num_cpus().checked_div(self.num_cores()).unwrap_or(0)
    }

    /// NUMA nodes of a set of CPUs; CPUs that are not online are ignored.
    pub fn nodes_of(&self, cpus: &CpuSet) -> NumaMask {
        cpus.iter().filter_map(|cpu| self.cpus.get(&cpu)).map(|info| info.node).collect()
    }

    fn count(&self, id: impl Fn(&CpuInfo) -> u32) -> usize {
        let ids: std::collections::BTreeSet<u32> = self.cpus.values().map(id).collect();
        ids.len()
    }
}

/// A NUMA node, also one without CPUs or without memory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct NumaNode {
    /// `MemTotal` of the node, in bytes; 0 if it has no memory or the kernel reports none.
    pub memory: u64,
    /// Number of huge pages, by page size in bytes.
    pub hugepages: BTreeMap<u64, u64>,
    /// Distance to each node (10 is local), by node ID; empty if the kernel reports none.
    pub distances: BTreeMap<u32, u32>,
}

/// CPUs and NUMA nodes, as sysfs describes them at the start.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MachineTopology {
    /// Online CPUs.
    pub cpus: CpuTopology,
    /// NUMA nodes, also those without CPUs or without memory. A machine without NUMA has the node 0.
    pub nodes: BTreeMap<u32, NumaNode>,
    /// CPUs that the kernel keeps free of ordinary work (`isolcpus`).
    pub isolated: CpuSet,
}
