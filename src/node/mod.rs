//! Facts about this machine, and the node object.
//!
//! In: files of the kernel, the node's part of the configuration. Out: a [`Machine`] as it is,
//! read once at start, and [`facts()`] about it for admission, status and environment. Nothing
//! here changes the machine. Behaviour: spec 01 §12, §14, 05 §4.3, §9, 06a §8.1.

pub mod cpus;
mod facts;
pub mod identity;
mod machine;
pub mod reserved;

pub use cpus::CpuSet;
pub use facts::{NodeConfig, NodeError, allocatable, architecture, capacity, declared_features, facts};
pub use machine::{Machine, MachineError};
