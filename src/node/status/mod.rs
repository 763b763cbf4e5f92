//! Node status setters: compute the node object from an observation of the node. Pure.
//!
//! Implements spec 05 §4.3-4.6. One file per group of setters; [`draft`] calls them in kubelet's order. No setter does
//! I/O: the caller gathers a [`NodeObservation`] first. A setter that fails adds one text to [`Draft::errors`]; the setters after
//! it run all the same.

pub mod addresses;
mod conditions;
mod identity;
mod images;
mod resources;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use jiff::Timestamp;

pub use images::NodeImage;

use super::{MachineInfo, NodeConfig, reservations::Reservations};
use berth_ports::{EventRecord, NodeFacts, RuntimeState};
use berth_types::{api, resources::Amounts};

/// Settings that are constant while the agent runs.
#[derive(Clone, Debug, Default)]
pub struct StatusSettings {
    /// Node name.
    pub name: String,
    /// Host name.
    pub hostname: String,
    /// Node section of the configuration.
    pub node: NodeConfig,
    /// Capacity and identity of the machine.
    pub machine: MachineInfo,
    /// Resources reserved from pods.
    pub reserved: Reservations,
    /// `--node-ip`.
    pub node_ips: Vec<IpAddr>,
    /// `nodeStatusMaxImages`; -1 for all.
    pub max_images: i32,
    /// Port of the kubelet API server.
    pub port: i32,
    /// Reported kubelet version (`v1.36.2`).
    pub kubelet_version: String,
    /// Warning that does not make the node NotReady (`CPU hardcapping unsupported`).
    pub soft_problem: Option<String>,
}

/// Extended resources of device plugins.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DevicePluginResources {
    /// Number of devices.
    pub capacity: Amounts,
    /// Number of healthy devices.
    pub allocatable: Amounts,
    /// Resources that plugins no longer report: they stay in the status with the amount 0.
    pub removed: BTreeSet<String>,
}

/// Observation of the node at one moment: input of [`draft`].
#[derive(Clone, Debug)]
pub struct NodeObservation {
    /// Time of the observation.
    pub now: Timestamp,
    /// Addresses and default routes of the machine.
    pub network: addresses::HostNetworkState,
    /// Node facts, of which pressures, shutdown, and declared features are read.
    pub facts: Arc<NodeFacts>,
    /// Result of the last runtime check.
    pub runtime: Arc<RuntimeState>,
    /// `<name>://<version>` of the runtime; empty while unknown.
    pub runtime_version: String,
    /// Images of the runtime; `None` before the first list.
    pub images: Option<Vec<NodeImage>>,
    /// Resources of device plugins.
    pub devices: Arc<DevicePluginResources>,
    /// Volumes in use; `None` before the volume manager has reported them.
    pub volumes_in_use: Option<Vec<String>>,
    /// Why storage is not ready; `None` when it is ready.
    pub storage_error: Option<String>,
}

/// What was reported before, so that no event is recorded twice and transition times stay stable while the API server
/// is unreachable.
#[derive(Clone, Debug, Default)]
pub struct ReportedState {
    /// Last reported state of each condition.
    conditions: BTreeMap<&'static str, conditions::ReportedCondition>,
    /// Whether the reboot event was recorded.
    reboot_reported: bool,
    /// Whether the node was unschedulable at the last draft.
    unschedulable: bool,
}

/// Result of [`draft`]: the desired node object, events, and errors.
#[derive(Clone, Debug)]
pub struct Draft {
    /// The desired node; its spec is unchanged.
    pub node: api::Node,
    /// Events of state changes.
    pub events: Vec<EventRecord>,
    /// Errors of setters; their fields keep the previous values.
    pub errors: Vec<String>,
}

/// Working state that the setters share.
struct StatusBuilder<'a> {
    settings: &'a StatusSettings,
    known: &'a NodeObservation,
    memory: &'a mut ReportedState,
    node: api::Node,
    status: api::NodeStatus,
    events: Vec<EventRecord>,
    errors: Vec<String>,
}

/// Computes the node object that `base` should become.
pub fn draft(
    settings: &StatusSettings,
    base: &api::Node,
    known: &NodeObservation,
    memory: &mut ReportedState,
) -> Draft {
    let mut node = base.clone();
    let status = node.status.take().unwrap_or_default();
    let mut work = StatusBuilder { settings, known, memory, node, status, events: Vec::new(), errors: Vec::new() };
    identity::labels(&mut work);
    addresses::set(&mut work);
    resources::set(&mut work);
    identity::set(&mut work);
    images::set(&mut work);
    identity::runtime(&mut work);
    conditions::pressures(&mut work);
    conditions::ready(&mut work);
    volumes(&mut work);
    schedulable(&mut work);
    work.status.declared_features = Some(known.facts.declared_features.clone());
    let StatusBuilder { mut node, status, events, errors, .. } = work;
    node.status = Some(status);
    Draft { node, events, errors }
}

impl StatusBuilder<'_> {
    /// Adds the event of a node state change.
    fn push_event(&mut self, reason: &'static str) {
        let text = format!("Node {} status is now: {reason}", self.settings.name);
        self.events.push(EventRecord::node_normal(reason, text));
    }
}

fn volumes(work: &mut StatusBuilder<'_>) {
    if let Some(volumes) = &work.known.volumes_in_use {
        work.status.volumes_in_use = Some(volumes.clone());
    }
}

fn schedulable(work: &mut StatusBuilder<'_>) {
    let unschedulable = work.node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false);
    if work.memory.unschedulable != unschedulable {
        work.memory.unschedulable = unschedulable;
        work.push_event(if unschedulable { "NodeNotSchedulable" } else { "NodeSchedulable" });
    }
}

#[cfg(test)]
pub(in crate::node) mod tests;
