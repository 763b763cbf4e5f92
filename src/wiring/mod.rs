//! Composition root: builds the parts from the configuration, connects them, and starts and stops them.
//!
//! The only module that depends on all others. Implements spec 01 §8, §9.

mod adapters;
mod allocators;
mod claims;
mod cluster;
mod composition_root;
mod csi;
mod devices;
pub mod embedded;
mod engine;
mod events;
mod eviction;
mod images;
mod kernel;
mod memory_qos;
mod node_addresses;
mod observation;
mod placement;
mod probes;
mod process;
mod process_lifecycle;
mod resources;
mod root_directory;
mod runtime;
mod server;
mod server_auth;
pub mod server_grpc;
mod settings;
mod shutdown;
mod volumes;

/// Drain of this node's pods through a root-only socket: request, response, and the socket.
pub mod drain {
    pub use crate::shutdown::{DrainRequest, DrainResponse, DrainSocket};
}

pub use process_lifecycle::run;
