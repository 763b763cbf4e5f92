//! Resource management: cgroups of pods, and host IDs of their user namespaces.
//!
//! ```text
//!  pod ─► values (pure) ─┐                              ┌─► sys::cgroup
//!                        ├─► Tree (blocking file work) ─┴─► Slices, for the systemd driver
//!  uid ─► names  (pure) ─┘          ▲
//!  pod workers, housekeeping ─► Manager ─► weight of Burstable pods, node allocatable
//! ```
//!
//! [`PodCgroupManager`] implements [`ResourceManager`](berth_ports::ResourceManager): it owns the sum of the
//! requests of Burstable pods and updates the QoS cgroups when that changes. File work runs on the
//! blocking pool, each call with a timeout. [`IdRanges`] allocates host IDs. Implements spec 06 §5,
//! 06a.

mod cgroup_state;
mod id_file;
pub mod id_space;
mod id_table;
pub mod kernel_flags;
pub mod manager;
pub mod names;
mod node_allocatable;
mod shares;
mod slices;
mod tree;
pub mod userns;
pub mod values;

pub use id_space::IdSpace;
pub use manager::{ManagerConfig, ManagerDeps, PodCgroupManager};
pub use node_allocatable::{Enforcement, Reservation, ReservedFor};
pub use userns::IdRanges;
pub use values::{Amounts, CgroupDriver, PodRules};
