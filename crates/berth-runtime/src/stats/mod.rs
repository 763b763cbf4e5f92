//! Resource usage statistics and metrics of pods and containers, read on request.
//!
//! ```text
//!  cgroups ─► cgroup_reader ─► Reading (cadvisor) ─────┐
//!  links (netlink) ────────────────────────────────────┼─► answers ─► ContainerStats, PodSandboxStats
//!  writable layers ─► layers (background count) ───────┤
//!  open files ─────────────────────────────────────────┴─► metrics ─► ListPodSandboxMetrics
//! ```
//!
//! Reads nothing without a request. Rates need two samples: `Meter` keeps the previous one. Implements spec 09a §5, 04b
//! §7.2, §11.

mod cgroup_reader;
pub mod cri_messages;
pub mod layer_usage;
pub mod link_counters;
pub mod metrics;
mod usage_rates;
pub mod volume;

pub use berth_cadvisor::reading::{CgroupMemory, Cpu, CpuShare, Depth, Reading};
pub use berth_sys::{
    cgroup::files::{self as group_files, CpuTimes, DeviceIo, MemoryStat, Pressure, PressureStats, Throttling},
    open_files::{self, OpenFiles},
};
pub use cgroup_reader::{processes, read};
pub use usage_rates::Meter;
