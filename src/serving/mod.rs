//! Adapters of the server's ports: implement `berth_server::ports` from snapshots.
//!
//! `berth-server` knows only these ports. Each file here implements some of them, from what the engine, the status
//! manager, PLEG, and the stats provider publish, or by a call to the runtime. Nothing here waits for a pod worker.

pub mod checkpoint;
pub mod debug_endpoints;
pub mod devices;
pub mod embedded_streams;
pub mod logs;
pub mod node_logs;
pub mod pages;
pub mod pods;
pub mod pprof;
mod pprof_encoder;
pub mod startup_hint;
pub mod stats;
mod streams;
pub mod task_liveness;
pub mod topology;

pub use streams::{RuntimeStreams, runtime_tls};
