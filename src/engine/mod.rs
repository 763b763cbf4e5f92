//! Pod engine: sync loop, pod manager, pod workers, admission, allocation, housekeeping.
//!
//! Input: ordered operations of the mux, observations of the pod store. Output: calls through the
//! traits in [`berth_ports`], statuses for the status manager. Implements spec 02a.

pub mod admission;
pub mod allocation;
pub mod deadline;
pub mod grace;
pub mod lifecycle;
mod pod_manager;
mod pod_snapshot;
mod source_readiness;
mod static_order;
mod sync_delay;
mod sync_loop;
mod sync_loop_liveness;
pub mod wait_class;
mod wall_clock;
mod worker;
mod worker_status;

pub use pod_snapshot::{PodReader, PodSnapshot};
pub use source_readiness::SourceReadiness;
pub use sync_loop::{EngineHandle, Leftovers, SyncLoopCommand, SyncLoopInputs, WorkerView, kill_and_wait, start};
pub use sync_loop_liveness::SyncLoopLiveness;
pub use worker::{EngineConfig, Report, WorkerContext, reports};
pub use worker_status::{PodWorkerStatus, StartWait};
