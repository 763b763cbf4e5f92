//! Pod shim: the process that keeps one pod of the embedded runtime and outlives the agent.
//!
//! ```text
//!  runtime: spawn ─starts─► berth-shim: worker ─► child (between clone and exec)
//!           client ◄─ socket, wire, plan ─►┘  └─► log files, exit_record ─read by─► runtime
//! ```
//!
//! It owns the pod's namespaces, standard streams, and log files, reaps its processes, and records the exits of
//! containers. The runtime makes all decisions and sends them as a [`plan`]. One thread, one poll, no async runtime.
//! Implements spec 09 §2, 09a §10-§14.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves"))]

pub mod child;
pub mod child_launcher;
pub mod exit_record;
pub mod log_tally;
pub mod pause;
pub mod plan;
pub mod program;
pub mod scope_placeholder;
pub mod socket;
pub mod wire;
pub mod worker;
