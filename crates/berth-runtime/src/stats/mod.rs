//! Resource usage statistics and metrics of pods and containers, read on request.
//!
//! ```text
//!  cgroups ─► kernel (sys::cgroup) ─► Reading ─────────┐
//!  links (netlink) ────────────────────────────────────┼─► answers ─► ContainerStats, PodSandboxStats
//!  writable layers ─► layers (background count) ───────┤
//!  open files ─────────────────────────────────────────┴─► metrics ─► ListPodSandboxMetrics
//! ```
//!
//! Reads nothing without a request. Rates need two samples: `Meter` keeps the previous one. Implements spec 09a §5, 04b
//! §7.2, §11.

pub mod answers;
mod kernel;
pub mod layers;
pub mod links;
mod meter;
pub mod metrics;
mod reading;
pub mod volume;

pub use berth_sys::{
    cgroup::files::{self as group_files, DeviceIo, Pressure, Stalls, Throttling},
    open_files::{self, OpenFiles},
};
pub use kernel::read;
pub use meter::Meter;
pub use reading::{Cpu, Depth, Memory, Reading, Share};
