//! Launch planning: CRI request, image configuration, and host properties to a shim launch plan.
//!
//! ```text
//!  CRI request ──┐
//!  image config ─┼─► launch() ─► LaunchPlan ─► shim
//!  host, found ──┘
//! ```
//!
//! Decisions are pure, one file per concern, and reject with the exact texts of the specification; host lookups run
//! beforehand. This module is stateless. Implements spec 09a §2.3, §2.4, §3.2, §6-§9.

pub mod args;
pub mod bundle;
pub mod capabilities;
pub mod cdi;
pub mod device_program;
pub mod devices;
pub mod environment;
#[cfg(test)]
mod fixture;
pub mod host;
pub mod image;
pub mod inputs;
pub mod limits;
pub mod mounts;
pub mod namespaces;
pub mod oci;
pub mod plan;
pub mod refusal;
pub mod resolver;
pub mod security;
pub mod stop_signal;
pub mod users;

pub use device_program::device_program;
pub use image::{ImageConfig, LaunchImage};
pub use inputs::{Groups, Host, LaunchInputs, MountSource, ResolvedResources, Sandbox, TargetContainer};
pub use namespaces::namespaces;
pub use plan::{Launch, exec, launch};
pub use refusal::{LaunchError, LaunchErrorKind};
pub use stop_signal::stop_signal;
