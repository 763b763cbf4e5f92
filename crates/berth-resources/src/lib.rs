//! Resource managers: devices of device plugins, and dynamic resource allocation (DRA).
//!
//! Allocators, checkpoints, and the table of device health are pure; IO is in tasks at the edge.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves"))]

mod checkpoint_writer;
pub mod cpu;
pub mod devices;
pub mod dra;
mod drain_advice;
mod go_json;
pub mod memory;
pub mod numa;
pub mod placement;
pub mod pod_level;
pub mod topology;
mod typed_dump;
