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
//! In: kernel files, the node section of the configuration, state of other modules as values. Out: a [`MachineInfo`], read
//! once at startup, [`facts()`] about it, and in a cluster ([`cluster_tasks`]) the node object, updated by one task, and the
//! lease, renewed by another. This module never changes the machine.
//!
//! Implements spec 01 §12, §14, 05 §4-5, §9, 06a §8.1, 10 §4.1-4.2.

pub mod cluster_tasks;
mod csi_drivers;
mod csi_entries;
mod csi_node;
mod csi_object;
mod facts;
mod facts_publisher;
#[cfg(test)]
mod fixture;
mod heartbeat_call;
mod host_network;
pub mod identity;
mod initial_node;
mod lease_controller;
mod lease_object;
mod machine;
mod name_conflict;
mod node_reconciler;
mod node_wait;
pub mod oom;
pub mod own_node;
mod patch;
pub mod pod_cidr;
mod registration;
mod report_schedule;
pub mod reservations;
mod resource_slices;
mod routes;
mod runtime_version;
mod standalone_addresses;
mod startup_metrics;
pub mod status;
mod status_writer;

pub use csi_drivers::CsiDrivers;
pub use facts::{NodeConfig, NodeError, allocatable, architecture, capacity, declared_features, facts};
pub use host_network::{HostNetwork, KernelNetwork};
pub use initial_node::RegistrationSettings;
pub use machine::{IdFiles, MachineError, MachineInfo, max_pids};
pub use resource_slices::delete_resource_slices;
pub use runtime_version::runtime_version;
pub use standalone_addresses::StandaloneAddresses;
