//! Builds the parts from the configuration, adapts them to each other's ports, starts and stops
//! them in order. The only room that knows all others. Behaviour: spec 01 §8, §9.

mod adapters;
mod build;
pub mod certificates;
mod cluster;
pub mod embedded;
pub mod embedded_streams;
mod events;
mod eviction;
mod kernel;
mod lasting;
mod life;
pub mod logging;
mod memory;
mod node_addresses;
mod oom;
mod open_images;
mod own_thread;
mod pages;
mod probes;
mod process;
mod profile;
mod pulses;
mod root_directory;
mod server;
mod server_auth;
mod server_checkpoint;
pub mod server_grpc;
mod server_logs;
pub mod server_node_logs;
pub mod server_profiles;
pub mod server_stats;
mod server_streams;
mod server_tools;
mod settings;
mod shutdown;
mod standalone;
mod standalone_objects;
pub mod state_file;
mod try_this;
mod volumes;
mod watchdog;
pub mod why;

/// How pods of this node are let go by who asks for it.
pub mod drain {
    pub use crate::shutdown::{Answer, Ask, Door};
}

pub use life::run;
pub use server_streams::{RuntimeStreams, runtime_tls};
