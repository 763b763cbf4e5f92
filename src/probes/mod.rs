//! Startup, readiness, and liveness probes of containers.
//!
//! ```text
//!  worker ── add, stop, remove ──► owner ◄── timer: next attempt due
//!  worker ── trigger ───────────►   │
//!                                    ├─► an attempt: exec (CRI), http, tcp, grpc
//!  worker, runtime ◄── results ◄─────┴─► status update, wake-up, events, metrics, file
//! ```
//!
//! In: pods from their workers ([`ProbeManager`](berth_ports::ProbeManager)), pod statuses
//! ([`ProbedPods`](berth_ports::ProbedPods)). Out: results by container instance.
//!
//! One task ([`scheduler`]) owns every probe: a single timer is set for the earliest attempt of all probes, and `state_machine`
//! (pure) decides on results. An attempt (`attempt`) is a task with a deadline, started through a semaphore; one that
//! hangs affects no other probe, and ends with its own. Results (`results`) are readable by all and survive the agent
//! in a file.
//!
//! Implements spec 05 §1.

pub mod attempt;
mod checkpoint;
mod connector;
mod exec;
mod grpc;
mod history;
mod http;
pub mod kind;
mod lookup;
mod manager;
pub mod outcome;
mod pod_observation;
mod probe;
mod request;
mod results;
pub mod scheduler;
mod state_machine;
mod stream;
mod target;
#[cfg(test)]
mod testing;
mod time_grid;
mod url;

pub use attempt::Handlers;
pub use history::{History, Run};
pub use lookup::LOOKUPS;
pub use manager::{ProbeManagerHandle, open};
pub use scheduler::ProbeDeps;
