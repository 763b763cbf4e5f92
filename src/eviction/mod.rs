//! Eviction: frees resources and evicts pods before the node itself starves.
//!
//! ```text
//!  statistics of memory, disks, PIDs ─► watcher ─► pressures ─► node conditions, admission
//!  kernel notifiers ──────────────────────┘ │
//!                                           ▼
//!  statistics of pods ────────────────► evictor ─► images, dead containers; then one pod
//! ```
//!
//! The watcher observes the node: more often the nearer a threshold is, and several times a second while one is met. It
//! owns the state of thresholds and reports pressures immediately. The evictor acts on its observations, one action at
//! a time: it reclaims node-level resources, observes again, and evicts one pod; it considers another pod only once
//! that one is cleaned up or a timeout has passed. All decisions are pure functions; dependencies are the traits of
//! [`ports`]. Implements spec 05 §3.

pub mod actions;
mod evictor;
pub mod kernel_notifier;
pub mod limits;
pub mod message;
pub mod node_reader;
pub mod page_cache;
pub mod pod_ranking;
pub mod ports;
pub mod pressure;
pub mod pressure_state;
pub mod signals;
#[cfg(test)]
mod testing;
pub mod usage;
mod watcher;

use std::time::Duration;

pub use evictor::{Evictor, EvictorDeps};
pub use watcher::{NodeSnapshot, Watcher, WatcherDeps};

use berth_config::eviction::Threshold;

/// Configuration of eviction.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct EvictionConfig {
    /// Configured thresholds.
    pub thresholds: Vec<Threshold>,
    /// `evictionPressureTransitionPeriod`.
    pub transition: Duration,
    /// `evictionMaxPodGracePeriod`, seconds.
    pub max_pod_grace: i64,
    /// `localStorageCapacityIsolation`: whether local storage limits of pods are enforced.
    pub local_storage: bool,
}
