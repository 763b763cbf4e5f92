//! From what CRI asks, what an image says and what the host is, to what a shim carries out.
//!
//! ```text
//!  CRI request ──┐
//!  image config ─┼─► launch() ─► LaunchPlan ─► shim
//!  host, found ──┘
//! ```
//!
//! Decisions are pure, a file for each concern, and refuse with the exact texts of the specification; what has to be
//! looked up on the host is gathered before. Nothing here has state. Behaviour: spec 09a §2.3, §2.4, §3.2, §6-§9.

pub mod image;
