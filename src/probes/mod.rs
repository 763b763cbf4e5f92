//! Asks containers whether they have started, are ready, are alive.
//!
//! ```text
//!  worker ── add, stop, remove ──► owner ◄── timer: the next moment
//!  worker ── trigger ───────────►   │
//!                                    ├─► an attempt: exec (CRI), http, tcp, grpc
//!  worker, runtime ◄── results ◄─────┴─► status at once, wake-up, events, metrics, file
//! ```
//!
//! In: pods from their workers ([`ProbeManager`](berth_ports::ProbeManager)), how they stand
//! ([`ProbedPods`](berth_ports::ProbedPods)). Out: results by container instance.
//!
//! One task ([`owner`]) owns every probe: one timer is set for the next moment of any, what its results come to is decided
//! by `turn` (pure). An attempt (`attempt`) is a task with a deadline, started through a semaphore; one that hangs costs
//! nothing but itself, and ends with its probe. Results are read by anyone (`results`) and outlive the agent in a file.
//!
//! Behaviour: spec 05 §1.

mod ask;
pub mod attempt;
mod dial;
mod exec;
mod grpc;
mod history;
mod http;
pub mod kind;
mod lookup;
mod manager;
pub mod outcome;
pub mod owner;
mod probe;
mod results;
mod saved;
mod schedule;
mod seen;
mod stream;
mod target;
#[cfg(test)]
mod testing;
mod turn;
mod url;

pub use attempt::Handlers;
pub use history::{History, Run};
pub use lookup::LOOKUPS;
pub use manager::{Manager, open};
pub use owner::Deps;
