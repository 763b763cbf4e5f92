//! CRI v1 services: one file per group of calls.
//!
//! `services` makes them; `server` serves them on a socket or in memory. A call that has begun completes even if its
//! caller disconnects. Implements spec 09a §1-§5.

mod connection_limit;
mod container;
mod container_start;
mod container_stop;
mod container_update;
mod exec_sync;
mod images;
mod info;
mod lists;
mod metrics;
mod sandbox;
pub mod sandbox_files;
pub mod sandbox_stop;
mod server;
mod service;
mod stats;
mod streams;
mod verbose_info;

pub use container::delete as delete_container;
pub use server::{InProcessConnector, over_memory, over_socket};
