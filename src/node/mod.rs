//! Node object, status, lease, and machine facts.
//!
//! ```text
//!  Machine, configuration ─► facts ─► admission, status of pods, environment
//!                                ▲
//!  own-Node watch ─► published ──┘        ┌─► register, status writer ─► nodes, nodes/status
//!  runtime, images, network, facts ─► cluster ─► lease controller    ─► leases
//!                                         └─► CSINode, slices        ─► csinodes, resourceslices
//! ```
//!
//! In: kernel files, the node section of the configuration, state of other modules as values. Out: a [`Machine`], read
//! once at startup, [`facts()`] about it, and in a cluster ([`cluster`]) the node object, updated by one task, and the
//! lease, renewed by another. This module never changes the machine.
//!
//! Implements spec 01 §12, §14, 05 §4-5, §9, 06a §8.1, 10 §4.1-4.2.

mod beat;
pub mod cluster;
pub mod cpus;
mod csi_drivers;
mod csi_entries;
mod csi_node;
mod csi_object;
mod facts;
mod host_network;
pub mod identity;
mod initial;
mod lease;
mod lease_object;
mod machine;
pub mod oom;
pub mod own_node;
mod patch;
pub mod pod_cidr;
mod presence;
mod published;
mod reconcile;
mod register;
mod report;
pub mod reserved;
mod rival;
mod routes;
mod runtime_version;
mod slices;
mod standalone;
mod startup;
pub mod status;
mod status_writer;
#[cfg(test)]
mod testing;

pub use cpus::CpuSet;
pub use csi_drivers::CsiDrivers;
pub use facts::{NodeConfig, NodeError, allocatable, architecture, capacity, declared_features, facts};
pub use host_network::{HostNetwork, KernelNetwork};
pub use initial::Origin;
pub use machine::{Machine, MachineError, max_pids};
pub use runtime_version::runtime_version;
pub use standalone::OwnAddresses;
