//! Pod engine: sync loop, pod manager, pod workers, admission, allocation, housekeeping.
//!
//! Input: ordered operations of the mux, observations of the pod store. Output: calls through the
//! traits in [`berth_ports`], statuses for the status manager. Implements spec 02a.

pub mod admission;
pub mod allocation;
pub mod deadline;
pub mod grace;
mod heartbeat;
pub mod lifecycle;
mod pod_manager;
mod pod_snapshot;
mod ready;
mod standings;
mod static_order;
mod sync_loop;
pub mod waits;
mod wall_clock;
mod work_queue;
mod worker;

pub use heartbeat::Heartbeat;
pub use pod_snapshot::{PodReader, PodSnapshot};
pub use ready::SourcesReady;
pub use standings::{Line, Standing};
pub use sync_loop::{Command, EngineHandle, Found, Inputs, WorkerView, kill_and_wait, start};
pub use worker::{EngineConfig, Report, WorkerContext, reports};
