//! Runtime manager: pod syncs and kills, garbage collection of containers, and the readiness check, by CRI calls.
//!
//! Input: [`SyncPod`](berth_ports::SyncPod) and [`KillPod`](berth_ports::KillPod) of the pod workers.
//! Output: CRI calls, events, and the result of each action.
//!
//! ```text
//!  desired + observed ─► actions (pure) ─► execute ─┬─► kill ─► hooks
//!                            │                      ├─► creates (sandbox, container)
//!                       init · resize               ├─► start ─► images, prepare, hooks
//!                                                   └─► actuate (resize in place)
//! ```
//!
//! The calls of a pod are made sequentially in its own worker; pods never wait for each other.
//! [`RuntimeManager`] owns the crash loop back-off, the creates in flight, and the checkpoint of
//! applied resources. Results of actions are observed through the pod store by the next sync, never by
//! listing. Implements spec 03a, 03b §8, 02a §9.8.

pub mod actions;
mod actuated_store;
pub mod backoff;
pub mod config_preparation;
mod container_kill;
mod container_start;
mod creation;
mod gc;
pub mod gc_rank;
pub mod grace;
mod hooks;
mod http_hook;
mod image_volumes;
mod init;
mod manager;
mod pod_sync;
pub mod preparer;
mod readiness_check;
mod removal;
pub mod request;
pub mod resize;
mod resize_actuation;

pub use actuated_store::ActuatedStore;
pub use gc::GcMode;
pub use manager::{RuntimeConfig, RuntimeDeps, RuntimeManager};
pub use readiness_check::{HealthCheck, RuntimeCheck};
