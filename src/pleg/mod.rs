//! Pod lifecycle event generator (PLEG): one store of observations, refreshed by events and lists.
//!
//! ```text
//!   CRI stream ─┐                            ┌─► pod store ─► PodView (worker)
//!   containerd ─┼─► dirty marks ─► query ────┤
//!   list timer ─┤                            ├─► metrics, log, died
//!   acted()    ─┘                            └─► health
//! ```
//!
//! Input: [`PodObserver::action_completed`](berth_ports::PodObserver::action_completed), [`Hint`]s, the clock. Output:
//! observations on watch channels, each with the generation at which its query *began*.
//!
//! One task (`owner.rs`) decides which pods are queried and when; a query is a separate task with its
//! own timeout, so a pod whose query hangs blocks no other pod. Marks coalesce: a flood of events costs
//! one query per pod, and a mark set during a query costs exactly one more. Events are only marks; the
//! query that follows is authoritative, and the list audits both. The store (`store.rs`) is written by
//! this module alone.
//!
//! Implements spec 03b §5-7, §15 items 1-2; 03a §12. Improvements (03b §15): no event queue that
//! overflows, no pod that makes the node unhealthy, streams are reopened forever.

mod audit_list;
mod changes;
mod config;
pub mod containerd_events;
pub mod cri_conversions;
mod cri_events;
mod expectations;
mod health;
mod hints;
mod inventory;
mod observer;
mod owner;
mod pod_query;
mod query_task;
mod store;

pub use changes::{Change, ChangeKind};
pub use config::{ContainerDied, PlegConfig, PlegDeps};
pub use containerd_events::ContainerdEvents;
pub use cri_events::CriEvents;
pub use expectations::Expect;
pub use hints::{EventHints, Hint, HintError, HintStream};
pub use observer::{Pleg, StuckPod, start};
