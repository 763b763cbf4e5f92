//! Seccomp filters: compiles OCI JSON profiles to classic BPF programs.
//!
//! ```text
//!  profile (JSON) ─► Profile ─┐
//!  capabilities, kernel ──────┼─► compile() ─► Filter (classic BPF) ─► shim ─► seccomp(2)
//!  system call tables ────────┘
//! ```
//!
//! All functions are pure and need no C library. A program has a section for each ABI that the kernel runs, and returns
//! ENOSYS for calls that are newer than the tables, so that C libraries fall back. Implements spec 09a §7.6.

mod assembler;
mod compiler;
mod machine;
mod profile;

pub use assembler::Instruction;
pub use compiler::{Conditions, Filter, compile};
pub use machine::{CpuArchitecture, Section};
pub use profile::{ProfileError, SeccompProfile};

/// The built-in default profile, OCI JSON.
pub const DEFAULT_PROFILE: &str = include_str!("default.json");

#[cfg(test)]
mod tests;
