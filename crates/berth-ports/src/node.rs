//! Facts about the node and the runtime, published as immutable snapshots on `watch` channels.

use std::{collections::BTreeMap, net::IpAddr};

use berth_types::api;

/// What admission, status and environment need to know of this node.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct NodeFacts {
    /// Node name.
    pub name: String,
    /// Host name.
    pub hostname: String,
    /// Labels of the node object (or of the synthetic one).
    pub labels: BTreeMap<String, String>,
    /// Taints.
    pub taints: Vec<api::Taint>,
    /// Capacity, base units as canonical quantities.
    pub capacity: BTreeMap<String, String>,
    /// Allocatable, base units as canonical quantities.
    pub allocatable: BTreeMap<String, String>,
    /// Host addresses: first one and the first of the other family; empty in standalone mode.
    pub host_ips: Vec<IpAddr>,
    /// Node pressure conditions that are true now (`MemoryPressure`, …).
    pub pressures: Vec<String>,
    /// Those that an earlier agent has seen and this one has not: they are reported, and refuse nobody.
    pub restored_pressures: Vec<String>,
    /// Whether the node is shutting down.
    pub shutting_down: bool,
    /// Features the node declares.
    pub declared_features: Vec<String>,
    /// Whether `supplementalGroupsPolicy: Strict` is supported.
    pub supplemental_groups_policy: bool,
}

/// Features of one runtime handler.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HandlerFeatures {
    /// Recursive read-only mounts.
    pub recursive_read_only_mounts: bool,
    /// User namespaces.
    pub user_namespaces: bool,
}

/// What the 5-second runtime check found (spec 03a §2.3).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RuntimeState {
    /// `None` once the runtime is fine; else the text for `Skipping pod synchronization`.
    pub runtime_error: Option<String>,
    /// `None` once the network is ready; else the text of the `NetworkNotReady` event.
    pub network_error: Option<String>,
    /// Runtime handlers by name (`""` is the default one).
    pub handlers: BTreeMap<String, HandlerFeatures>,
    /// `supplemental_groups_policy` of the runtime features.
    pub supplemental_groups_policy: bool,
}
