//! The node's object from what is known of the node. Pure. Behaviour: spec 05 §4.3-4.6.
//!
//! A file per group of setters; [`draft`] calls them in the reference's order. Nothing here asks
//! anybody: the shell gathers a [`Known`] first. What a setter cannot do is one text among
//! [`Draft::errors`]; the setters after it run all the same.

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

use super::{Machine, NodeConfig, reserved::Reserved};
use berth_ports::{Event, NodeFacts, RuntimeState};
use berth_types::{api, resources::Amounts};

/// What never changes while the agent runs.
#[derive(Clone, Debug, Default)]
pub struct StatusSettings {
    /// Node name.
    pub name: String,
    /// Host name.
    pub hostname: String,
    /// The node's part of the configuration.
    pub node: NodeConfig,
    /// The machine.
    pub machine: Machine,
    /// What is kept from pods.
    pub reserved: Reserved,
    /// `--node-ip`.
    pub node_ips: Vec<IpAddr>,
    /// `nodeStatusMaxImages`; -1 for all.
    pub max_images: i32,
    /// Port of the server.
    pub port: i32,
    /// The version we report (`v1.36.2`).
    pub kubelet_version: String,
    /// What is wrong without making the node unready (`CPU hardcapping unsupported`).
    pub soft_problem: Option<String>,
}

/// Resources of device plugins.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Devices {
    /// What they have.
    pub capacity: Amounts,
    /// What of it is healthy.
    pub allocatable: Amounts,
    /// What they no longer tell of: it stays, with nothing.
    pub removed: BTreeSet<String>,
}

/// What is known at one moment.
#[derive(Clone, Debug)]
pub struct Known {
    /// Now.
    pub now: Timestamp,
    /// What the machine's network shows.
    pub network: addresses::Network,
    /// Pressures, shutdown and declared features are read.
    pub facts: Arc<NodeFacts>,
    /// What the runtime check found.
    pub runtime: Arc<RuntimeState>,
    /// `<name>://<version>` of the runtime; empty where it did not tell.
    pub runtime_version: String,
    /// Images of the runtime; `None` before it listed them.
    pub images: Option<Vec<NodeImage>>,
    /// Device plugins.
    pub devices: Arc<Devices>,
    /// Volumes in use; `None` before the volume manager knows.
    pub volumes_in_use: Option<Vec<String>>,
    /// Why storage is not ready.
    pub storage_error: Option<String>,
}

/// What was told before, so that nothing is told twice and transitions keep their time while the
/// API server does not hear of them.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// What was told of each condition.
    conditions: BTreeMap<&'static str, conditions::Told>,
    /// Whether the new boot was told.
    boot_told: bool,
    /// Whether the node took no pods when it was last looked at.
    unschedulable: bool,
}

/// The node as it should be, and what there is to tell.
#[derive(Clone, Debug)]
pub struct Draft {
    /// The node; spec as it was.
    pub node: api::Node,
    /// Events of what moved.
    pub events: Vec<Event>,
    /// Setters that failed; what they set is as it was.
    pub errors: Vec<String>,
}

/// What the setters work on.
struct Work<'a> {
    settings: &'a StatusSettings,
    known: &'a Known,
    memory: &'a mut Memory,
    node: api::Node,
    status: api::NodeStatus,
    events: Vec<Event>,
    errors: Vec<String>,
}

/// The node object that `base` should become.
pub fn draft(settings: &StatusSettings, base: &api::Node, known: &Known, memory: &mut Memory) -> Draft {
    let mut node = base.clone();
    let status = node.status.take().unwrap_or_default();
    let mut work = Work { settings, known, memory, node, status, events: Vec::new(), errors: Vec::new() };
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
    let Work { mut node, status, events, errors, .. } = work;
    node.status = Some(status);
    Draft { node, events, errors }
}

impl Work<'_> {
    /// An event of the node's state.
    fn tell(&mut self, reason: &'static str) {
        let text = format!("Node {} status is now: {reason}", self.settings.name);
        self.events.push(Event::node_normal(reason, text));
    }
}

fn volumes(work: &mut Work<'_>) {
    if let Some(volumes) = &work.known.volumes_in_use {
        work.status.volumes_in_use = Some(volumes.clone());
    }
}

fn schedulable(work: &mut Work<'_>) {
    let unschedulable = work.node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false);
    if work.memory.unschedulable != unschedulable {
        work.memory.unschedulable = unschedulable;
        work.tell(if unschedulable { "NodeNotSchedulable" } else { "NodeSchedulable" });
    }
}

#[cfg(test)]
pub(in crate::node) mod tests;
