//! Port of `/debug/devices`: devices of this node, their health, and the containers that have them.

use serde::Serialize;

/// Health of a device as its plugin reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum DeviceHealth {
    /// Can be allocated.
    Healthy,
    /// The plugin reports it so, no longer lists it, or is not connected.
    Unhealthy,
}

/// A device of a device plugin.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceEntry {
    /// Resource name.
    pub resource: String,
    /// Device ID, unique within its resource.
    pub id: String,
    /// Whether it can be allocated.
    pub health: DeviceHealth,
    /// NUMA nodes; empty without topology.
    pub numa_nodes: Vec<i64>,
    /// Containers that have the device: several if an init container left it to a later one of its pod.
    pub assigned_to: Vec<AssignedContainer>,
}

/// A container that has a device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AssignedContainer {
    /// Namespace of the pod; empty if the pod is unknown.
    pub namespace: String,
    /// Name of the pod; empty if the pod is unknown.
    pub pod: String,
    /// UID of the pod.
    pub uid: String,
    /// Container name.
    pub container: String,
}

/// Lists the devices of this node.
pub trait DeviceList: Send + Sync + 'static {
    /// All devices, sorted by resource, then by ID in natural order. Never blocks.
    fn devices(&self) -> Vec<DeviceEntry>;
}
