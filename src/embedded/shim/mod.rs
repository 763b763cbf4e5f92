//! One small process per pod that outlives the agent: it holds namespaces, stdio and logs, reaps, and records how
//! containers ended.
//!
//! ```text
//!  daemon: spawn ─starts─► berth-shim: worker ─► child (between fork and exec)
//!          client ◄─ socket, wire, plan ─►┘  └─► log files, exit_record ─read by─► daemon
//! ```
//!
//! The daemon decides everything and tells it as a [`plan`]; the shim's own program is `src/bin/berth-shim.rs`, small
//! and without an async runtime. Behaviour: spec 09 §2, 09a §10-§14.

pub mod child;
pub mod children;
pub mod client;
pub mod exit_record;
pub mod keeper;
pub mod log_tally;
pub mod plan;
pub mod socket;
pub mod spawn;
pub mod wire;
pub mod worker;
