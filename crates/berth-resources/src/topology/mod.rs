//! Topology of the machine: CPUs, caches, NUMA nodes, their memory, and distances.

#[cfg(test)]
pub(crate) mod fake_sysfs;
#[cfg(test)]
pub(crate) mod machines;
pub mod model;
pub mod sysfs;

pub use model::{CpuInfo, CpuTopology, MachineTopology, NumaNode};
pub use sysfs::{TopologyError, online_cpus};
