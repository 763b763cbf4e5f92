//! Filters of system calls: from a profile in OCI's JSON to the program the kernel executes.
//!
//! ```text
//!  profile (JSON) ─► Profile ─┐
//!  capabilities, kernel ──────┼─► compile() ─► Filter (classic BPF) ─► shim ─► seccomp(2)
//!  tables of numbers ─────────┘
//! ```
//!
//! Pure, all of it, and no C library: one program has a section for each architecture a kernel runs, and answers ENOSYS
//! to calls that are newer than our tables, so that C libraries fall back. Behaviour: spec 09a §7.6.

mod assemble;
mod compile;
mod machine;
mod profile;

pub use assemble::Instruction;
pub use compile::{Conditions, Filter, compile};
pub use machine::{Machine, Section};
pub use profile::{Profile, ProfileError};

/// The built-in profile.
pub const DEFAULT_PROFILE: &str = include_str!("default.json");

#[cfg(test)]
mod tests;
