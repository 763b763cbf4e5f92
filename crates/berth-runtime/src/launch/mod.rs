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
pub mod facts;
pub mod find;
pub mod host;
pub mod image;
pub mod limits;
pub mod mounts;
pub mod namespaces;
pub mod oci;
pub mod plan;
pub mod refusal;
pub mod security;
pub mod stop_signal;
#[cfg(test)]
mod testing;
pub mod users;

pub use device_program::device_program;
pub use facts::{Found, Groups, Host, Inputs, Place, Sandbox, TargetContainer};
pub use image::{ImageConfig, LaunchImage};
pub use namespaces::namespaces;
pub use plan::{Launch, exec, launch};
pub use refusal::{Refusal, RefusalKind};
pub use stop_signal::stop_signal;
