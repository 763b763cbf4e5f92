//! Adapters of the server's ports: implement `berth_server::ports` from snapshots.
//!
//! `berth-server` knows only these ports. Each file here implements some of them, from what the engine, the status
//! manager, PLEG, and the stats provider publish, or by a call to the runtime. Nothing here waits for a pod worker.

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
