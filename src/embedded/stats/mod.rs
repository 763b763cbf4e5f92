//! What pods and containers use, told when somebody asks.
//!
//! ```text
//!  control groups ─► kernel ─► group_files ─► Reading ─┐
//!  links (netlink) ────────────────────────────────────┼─► answers ─► ContainerStats, PodSandboxStats
//!  writable layers ─► layers (a walk in the background)┤
//!  open files ─────────────────────────────────────────┴─► metrics ─► ListPodSandboxMetrics
//! ```
//!
//! Nothing is read unless somebody asks. Rates need two looks: `Meter` keeps the one before. Behaviour: spec 09a §5, 04b
//! §7.2, §11.

pub mod answers;
mod group_files;
mod kernel;
pub mod layers;
pub mod links;
mod meter;
pub mod metrics;
pub mod open_files;
mod reading;
pub mod volume;

pub use kernel::read;
pub use meter::Meter;
pub use reading::{Cpu, Depth, Device, Held, Memory, Pressure, Reading, Share, Stalls};
