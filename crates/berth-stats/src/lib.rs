//! Resource statistics of the node, its pods, and containers: `/stats/summary` and metrics pages.
//!
//! ```text
//!  control groups ─► Reader ─┐
//!  /proc, statfs, du ────────┼─► Snapshot ─► summary ─► /stats/summary
//!  runtime (writable layers) ┘               │  └─────► /metrics/resource
//!                                            └────────► /metrics/cadvisor
//! ```
//!
//! Nothing runs without requests. [`StatsProvider`] takes a snapshot when a page is requested and the cached one is
//! too old; concurrent requests share one snapshot and one page. Operations that leave the process or may hang (a call
//! to the runtime, a disk) have a deadline; their failure costs fields, not the page. Implements spec 04b §7-11.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves"))]

mod cadvisor_labels;
mod cadvisor_machine;
pub mod cadvisor_page;
mod cgroup;
mod config;
pub mod disk;
pub mod disk_measurer;
mod disk_usages;
mod encoding_cache;
pub mod filesystems;
pub mod host;
pub mod mounts;
pub mod network;
mod node_observer;
pub mod open_files;
mod page;
pub mod pods;
mod provider;
pub mod reader;
pub mod resource_page;
mod runtime_report;
mod settings_watch;
mod single_flight_cache;
pub mod snapshot;
pub mod summary;
pub mod summary_builder;
pub mod summary_json;
mod summary_values;
mod system_groups;
#[cfg(test)]
mod testing;

pub use berth_cadvisor::reading;
pub use berth_sys::cgroup::files as cgroup_files;
pub use config::{HiddenMetrics, PodDirectories, StatsConfig, StatsDeps};
pub use disk_measurer::MeasurementTasks;
pub use disk_usages::LOGS_AGE;
pub use encoding_cache::{PageCompression, compressed};
pub use host::Host;
pub use node_observer::{MemoryObservation, NodeObservation, NodeObserver, file_system};
pub use provider::{FILES_AGE, MEMO, MetricsPage, RUNTIME_AGE, StatsProvider};
pub use reader::PodCgroupPaths;
pub use summary::{Form, PodPaths, Storage, VolumePath};
