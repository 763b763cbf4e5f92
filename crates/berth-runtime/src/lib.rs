//! Embedded container runtime: CRI v1 for pods on a Linux host without any other runtime.
//!
//! It serves CRI to the agent in memory and to other clients over a socket. Metadata is a directory per object. One
//! small process per pod, the shim, owns the running containers and survives the agent. Implements spec 09, 09a, 09b.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves"))]

pub mod actor;
pub mod config;
pub mod container;
pub mod cri;
pub mod cri_conversions;
pub mod errors;
pub mod events;
#[cfg(test)]
mod fixture;
pub mod groups;
pub mod ids;
pub mod images;
pub mod launch;
pub mod log_totals;
pub mod lost_networks;
mod name_reservations;
pub mod network;
pub mod ports;
mod reconciliation;
pub mod recovery;
pub mod runtime;
pub mod runtime_context;
pub mod sandbox;
pub mod seccomp;
pub mod settings;
pub mod shim;
pub mod stats;
pub mod store;
pub mod streams;
pub mod systemd_scopes;
pub mod wiring;
