//! What pods and containers use, told when somebody asks.
//!
//! ```text
//!  control groups ─► kernel (sys::cgroup) ─► Reading ──┐
//!  links (netlink) ────────────────────────────────────┼─► answers ─► ContainerStats, PodSandboxStats
//!  writable layers ─► layers (a walk in the background)┤
//!  open files ─────────────────────────────────────────┴─► metrics ─► ListPodSandboxMetrics
//! ```
//!
//! Nothing is read unless somebody asks. Rates need two looks: `Meter` keeps the one before. Behaviour: spec 09a §5, 04b
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
