//! Shares of the machine: the cgroups of pods, and the host ids of their user namespaces.
//!
//! ```text
//!  pod ─► values (pure) ─┐                              ┌─► sys::cgroup
//!                        ├─► Tree (blocking file work) ─┴─► Slices, where systemd makes the groups
//!  uid ─► names  (pure) ─┘          ▲
//!  pod workers, housekeeping ─► Manager ─► burstable's weight, node allocatable
//! ```
//!
//! [`Manager`] plays [`ResourceManager`](berth_ports::ResourceManager): it owns what
//! burstable pods request together and writes the QoS groups when that changes. File work runs on
//! the blocking pool, each call with a deadline. [`IdRanges`] hands out host
//! ids. Behaviour: spec 06 §5, 06a.

mod budget;
pub mod cpu_state;
mod id_file;
pub mod id_space;
mod id_table;
pub mod kernel_flags;
pub mod manager;
pub mod names;
mod shares;
mod slices;
mod tree;
pub mod userns;
pub mod values;

pub use budget::{Enforcement, Reservation, ReservedFor};
pub use id_space::IdSpace;
pub use manager::{Manager, ManagerConfig, ManagerDeps};
pub use userns::IdRanges;
pub use values::{Amounts, Driver, PodRules};
