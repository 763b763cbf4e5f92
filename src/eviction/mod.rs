//! Eviction: who has to go before the node itself starves.
//!
//! ```text
//!  gauges (memory, disks, processes) ─► watcher ─► pressures ─► node conditions, admission
//!  the kernel's word ─────────────────────┘ │
//!                                           ▼
//!  statistics of pods ────────────────► evictor ─► images, dead containers; then one pod
//! ```
//!
//! The watcher looks at the node: sooner the nearer a threshold is, and a few times a second while one is met. It owns
//! what is remembered of thresholds and tells pressures at once. The evictor acts on what it says, one thing at a time:
//! it frees what nobody needs, looks again, and lets one pod go; not before that one is gone does it think of another.
//! Everything that decides is pure; everything it needs of others is a role in [`ports`]. Behaviour: spec 05 §3.

pub mod actions;
mod evictor;
pub mod kernel_notifier;
pub mod limits;
pub mod message;
pub mod node_reader;
pub mod page_cache;
pub mod ports;
pub mod pressure;
pub mod pressure_state;
pub mod rank;
pub mod signals;
#[cfg(test)]
mod testing;
pub mod usage;
mod watcher;

use std::time::Duration;

pub use evictor::{Evictor, EvictorDeps};
pub use watcher::{Picture, Watcher, WatcherDeps};

use berth_config::eviction::Threshold;

/// What the room is told.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct EvictionConfig {
    /// Thresholds as configured.
    pub thresholds: Vec<Threshold>,
    /// `evictionPressureTransitionPeriod`.
    pub transition: Duration,
    /// `evictionMaxPodGracePeriod`, seconds.
    pub max_pod_grace: i64,
    /// `localStorageCapacityIsolation`: whether pods are held to their limits on the disk.
    pub local_storage: bool,
}
