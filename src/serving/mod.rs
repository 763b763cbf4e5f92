//! Adapters of the server's ports: what it serves, answered from snapshots.
//!
//! `berth-server` knows roles only (`berth_server::ports`). Each file here plays some of them, from what the engine, the
//! status manager, PLEG, and the statistics publish, or by a call of the runtime. Nothing here waits for a pod worker.

pub mod checkpoint;
pub mod embedded_streams;
pub mod logs;
pub mod node_logs;
pub mod pages;
pub mod pods;
mod pprof_encoder;
pub mod profiles;
pub mod pulses;
pub mod startup_hint;
pub mod stats;
mod streams;
pub mod tools;

pub use streams::{RuntimeStreams, runtime_tls};
