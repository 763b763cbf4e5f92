//! Snapshots of node and runtime facts, published on `watch` channels.

use std::{collections::BTreeMap, net::IpAddr};

use berth_types::api;

/// Node facts for admission, status, and container environment.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct NodeFacts {
    /// Node name.
    pub name: String,
    /// Host name.
    pub hostname: String,
    /// Labels of the Node object (or of the synthetic one).
    pub labels: BTreeMap<String, String>,
    /// `registerWithTaints` until the Node object is known, then its `spec.taints`.
    pub taints: Vec<api::Taint>,
    /// Capacity; canonical quantities in base units.
    pub capacity: BTreeMap<String, String>,
    /// Allocatable; canonical quantities in base units.
    pub allocatable: BTreeMap<String, String>,
    /// Host IPs: the first address and the first of the other family; empty in standalone mode.
    pub host_ips: Vec<IpAddr>,
    /// Pressure conditions that are true now (`MemoryPressure`, …).
    pub pressures: Vec<String>,
    /// Pressure conditions of a previous agent run that this one has not observed: reported, but ignored by admission.
    pub restored_pressures: Vec<String>,
    /// Whether the node is shutting down.
    pub shutting_down: bool,
    /// Declared features of the node.
    pub declared_features: Vec<String>,
    /// Whether `supplementalGroupsPolicy: Strict` is supported.
    pub supplemental_groups_policy: bool,
}

/// Supported features of one runtime handler.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HandlerFeatures {
    /// Whether mounts can be read-only recursively (`recursiveReadOnly`).
    pub recursive_read_only_mounts: bool,
    /// Whether the runtime supports pods with `hostUsers: false`.
    pub user_namespaces: bool,
}

/// Result of the runtime check, run every 5 seconds (spec 03a §2.3).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RuntimeState {
    /// `None` if the runtime is ready; otherwise the text for `Skipping pod synchronization`.
    pub runtime_error: Option<String>,
    /// `None` if the network is ready; otherwise the text of the `NetworkNotReady` event.
    pub network_error: Option<String>,
    /// Runtime handlers by name (`""` is the default one).
    pub handlers: BTreeMap<String, HandlerFeatures>,
    /// `supplemental_groups_policy` of the runtime's features.
    pub supplemental_groups_policy: bool,
}
