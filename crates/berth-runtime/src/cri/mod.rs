//! CRI v1 services: one file per group of calls.
//!
//! `services` makes them; `serve` serves them on a socket or in memory. A call that has begun completes even if its
//! caller disconnects. Implements spec 09a §1-§5.

mod change;
mod container;
mod container_end;
mod exec_sync;
pub mod files;
mod images;
mod info;
mod lists;
mod metrics;
mod places;
mod sandbox;
mod serve;
mod service;
mod start;
mod stats;
pub mod stop;
mod streams;
mod verbose;

pub use container::delete as delete_container;
pub use serve::{Memory, over_memory, over_socket};
