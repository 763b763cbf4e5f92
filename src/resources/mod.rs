//! Resource management: cgroups of pods, and host IDs of their user namespaces.
//!
//! ```text
//!  pod ─► values (pure) ─┐                              ┌─► sys::cgroup
//!                        ├─► Tree (blocking file work) ─┴─► Slices, for the systemd driver
//!  uid ─► names  (pure) ─┘          ▲
//!  pod workers, housekeeping ─► Manager ─► QoS cgroups, node allocatable
//! ```
//!
//! [`PodCgroupManager`] implements [`ResourceManager`](berth_ports::ResourceManager): it owns the sums of the
//! requests of pods and updates the QoS cgroups when these change. File work runs on the blocking pool, each call with
//! a timeout. [`IdRanges`] allocates host IDs. Implements spec 06 §5, 06a.

mod cgroup_state;
pub mod class_limits;
mod class_requests;
mod id_file;
pub mod id_space;
mod id_table;
pub mod kernel_flags;
pub mod manager;
pub mod names;
mod node_allocatable;
mod slices;
pub mod system_cgroups;
mod tree;
pub mod userns;
pub mod values;

pub use class_limits::{ClassRules, ReservedRequests};
pub use id_space::IdSpace;
pub use manager::{ManagerConfig, ManagerDeps, PodCgroupManager};
pub use node_allocatable::{Enforcement, Reservation, ReservedFor};
pub use userns::IdRanges;
pub use values::{Amounts, CgroupDriver, PodRules};
