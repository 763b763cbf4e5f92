//! From plan to CRI calls.
//!
//! In: [`SyncPod`](berth_ports::SyncPod) and [`KillPod`](berth_ports::KillPod)
//! of the pod workers. Out: CRI calls, events, and what came of each action.
//!
//! ```text
//!  desired + observed ─► actions (pure) ─► execute ─┬─► kill ─► hooks
//!                            │                      ├─► creates (sandbox, container)
//!                       init · resize               ├─► start ─► images, prepare, hooks
//!                                                   └─► actuate (resize in place)
//! ```
//!
//! A pod's calls are made one after the other on its own worker; pods never wait for each other.
//! [`RuntimeManager`] owns the crash back-off, the creates in flight and the record of actuated
//! resources. What an action needs to know of the runtime's answers it learns from the pod store
//! in the next turn, never by listing. Behaviour: spec 03a, 03b §8, 02a §9.8.

pub mod actions;
mod actuate;
mod actuated;
pub mod backoff;
mod creates;
mod execute;
mod gc;
pub mod gc_rank;
pub mod grace;
mod hooks;
mod http_hook;
mod image_volumes;
mod init;
mod kill;
mod manager;
pub mod prepare;
pub mod preparer;
mod removal;
pub mod request;
pub mod resize;
mod start;
mod state;

pub use actuated::ActuatedStore;
pub use gc::GcMode;
pub use manager::{RuntimeConfig, RuntimeDeps, RuntimeManager};
pub use state::{HealthCheck, RuntimeCheck};
