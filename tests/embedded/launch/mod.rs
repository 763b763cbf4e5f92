//! Container launch between `clone3` and `execve`, with real namespaces, overlays, and cgroups.
//!
//! Needs root and `busybox-static`; without root every test reports so and passes.

mod exec;
mod hooks;
mod limits;
mod mounts;
mod pods;
mod process;
