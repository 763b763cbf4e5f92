//! The services of CRI v1: a file for each group of calls.
//!
//! `services` makes them; `serve` answers on a socket, or over memory. What a call does once begun goes on when its
//! caller leaves. Behaviour: spec 09a §1-§5.

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
