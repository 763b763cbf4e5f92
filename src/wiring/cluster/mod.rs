//! Cluster mode: clients, reflectors, and writers of a node that has an API server.
//!
//! ```text
//!  kubeconfig, bootstrap ─► client ─┬─► nodes, pods ─► feed, offline ─► the sources
//!                                   ├─► objects ─► volumes, environments; pod resyncs
//!                                   └─◄ node object, lease, statuses, mirrors, events, certificates
//! ```
//!
//! In: the client. Out: the pods of this node as a source, the objects they refer to, the Node object, statuses, and
//! events. Each part waits for the API server by itself, also for the first certificate: nothing here delays a static
//! pod. Implements spec 10, spec 01 §9.

mod bootstrap_client;
mod client;
mod client_factory;
mod csi;
mod node;
mod node_join;
mod serving_certificate;

pub(super) use self::{
    node::{NodeParts, VolumesInUse},
    node_join::{Cluster, join},
};
