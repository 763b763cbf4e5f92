//! The embedded runtime through its services: a client over memory, as the agent's. Spec 09 §9, 09a §1-§5.
//!
//! The parts below are fakes; what needs a kernel is in `real.rs`, needs root, and says so where it is skipped.

mod builtin;
mod fakes;
mod real;
mod services;
mod streams;
