//! The scripted CRI: an honest runtime without containers.
//!
//! It keeps the contract of CRI v1 (reserved names, states, idempotent stop and remove, graceful
//! stop, events after the fact) and adds what tests need: programmed container behaviour,
//! latencies, errors, hangs, lost, duplicated and re-ordered events, and a call log. Deadlines
//! are inside, as the trait demands: a call that takes longer is answered `TimedOut` and goes on
//! in the background.

mod history;
mod script;
pub mod server;
mod service;
mod state;
pub mod streaming;
mod streams;

pub use history::{Fact, History, Moment, Span};
pub use script::{Behaviour, Call, EventFaults, Fault, Latency};
pub use service::ScriptedCri;
pub use streams::StreamRequest;
