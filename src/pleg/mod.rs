//! What really runs: one store of observations, refreshed by events and lists.
//!
//! ```text
//!   CRI stream ─┐                            ┌─► pod store ─► PodView (worker)
//!   containerd ─┼─► dirty marks ─► look ─────┤
//!   list timer ─┤                            ├─► metrics, log, died
//!   acted()    ─┘                            └─► health
//! ```
//!
//! In: [`PodObserver::acted`](berth_ports::PodObserver::acted), [`Hint`]s, the clock.
//! Out: observations on watch channels, each with the generation at which its look *began*.
//!
//! One task (`owner.rs`) decides what is looked at and when; a look is a task of its own with its
//! own deadline, so a pod whose query hangs stops nobody else. Marks coalesce: a flood costs one
//! look per pod, and a mark set during a look costs exactly one more. Events are only ever marks;
//! the truth is the query that follows, and the list audits both. The store (`store.rs`) is
//! written by this room alone.
//!
//! Behaviour: spec 03b §5-7, §15 items 1-2; 03a §12. Do better (03b §15): no event queue that overflows, no
//! pod that makes the node unhealthy, streams are re-opened for ever.

mod changes;
mod config;
pub mod containerd_events;
pub mod convert;
mod cri_events;
mod expect;
mod health;
mod hints;
mod inventory;
mod list;
mod look;
mod look_task;
mod observer;
mod owner;
mod store;

pub use changes::{Change, ChangeKind};
pub use config::{ContainerDied, PlegConfig, PlegDeps};
pub use containerd_events::ContainerdEvents;
pub use cri_events::CriEvents;
pub use expect::Expect;
pub use hints::{EventHints, Hint, HintError, HintStream};
pub use observer::{Pleg, StuckPod, start};
