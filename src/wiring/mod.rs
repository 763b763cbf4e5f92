//! Builds the parts from the configuration, adapts them to each other's ports, starts and stops
//! them in order. The only room that knows all others. Behaviour: spec 01 §8, §9.

mod adapters;
mod build;
mod cluster;
pub mod embedded;
mod engine;
mod events;
mod eviction;
mod kernel;
mod life;
mod node_addresses;
mod observation;
mod open_images;
mod probes;
mod process;
mod resources;
mod root_directory;
mod runtime;
mod server;
mod server_auth;
pub mod server_grpc;
mod settings;
mod shutdown;
mod volumes;

/// How pods of this node are let go by who asks for it.
pub mod drain {
    pub use crate::shutdown::{Answer, Ask, Door};
}

pub use life::run;
