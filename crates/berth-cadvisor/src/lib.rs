//! cgroup readings and cAdvisor metric families, for the kubelet's pages and the CRI of the embedded runtime. Pure.
//!
//! ```text
//!  control_files (which files) ─┐
//!  contents of the files ───────┴─► PartialReading ─► Reading ─► families ─► label values and numbers
//! ```
//!
//! Users read the files and write the series: `berth-stats` with open files, a cache of idle cgroups, and text pages;
//! `berth-runtime` once per request, into CRI messages. Implements spec 04b §7.2, §11.

#![forbid(unsafe_code)]

pub mod control_files;
pub mod families;
mod family;
mod partial_reading;
pub mod reading;

pub use family::{
    DiskCounters, Family, MetricInputs, MetricKind, MetricSource, MountedFileSystem, PageOmission, Stamp, Value,
};
pub use partial_reading::{CgroupSettings, MachineMemory, PartialReading};
