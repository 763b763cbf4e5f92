//! A node of a cluster: what follows the API server, and what is reported to it.
//!
//! ```text
//!  kubeconfig, bootstrap ─► client ─┬─► nodes, pods ─► feed, offline ─► the sources
//!                                   ├─► objects ─► volumes, environments; pods look again
//!                                   └─◄ node object, lease, statuses, mirrors, events, certificates
//! ```
//!
//! In: the client. Out: the pods of this node as a source, the objects they refer to, the Node object,
//! statuses and events. Everything waits for the API server by itself, also for the first certificate:
//! nothing here delays a static pod. Behaviour: spec 10, spec 01 §9.

mod client;
mod csi;
mod feed;
mod first;
mod join;
mod node;
mod offline;
mod opener;
mod own;
mod ranges;
mod serving;

pub(super) use self::{
    join::{Cluster, join},
    node::{NodeParts, VolumesTold},
};
