//! The embedded runtime through its CRI services: an in-memory client, as in the agent.
//!
//! Spec 09 §9, 09a §1-§5. The ports are fakes; tests that need a kernel are in `real.rs`, need root, and report so when
//! they are skipped.

mod builtin;
mod fakes;
mod real;
mod services;
mod streams;
