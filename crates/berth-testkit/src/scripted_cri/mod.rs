//! Scripted CRI: fake container runtime that keeps the CRI v1 contract without real containers.
//!
//! The contract includes reserved names, states, idempotent stop and remove, graceful stop, and events after the
//! fact. Tests can program container behavior, latencies, errors, hangs, and lost, duplicated, or reordered events,
//! and read a call log. Deadlines are internal, as the trait requires: a call that exceeds its deadline returns
//! `TimedOut` and continues in the background.

mod history;
mod script;
pub mod server;
mod service;
mod state;
pub mod streaming;
mod streams;

pub use history::{History, LifecycleEvent, Span, TimedEvent};
pub use script::{Behaviour, Call, EventFaults, Fault, Latency};
pub use service::ScriptedCri;
pub use streams::StreamRequest;
