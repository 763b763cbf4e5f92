//! Containers between `clone3` and `execve`, with real namespaces, overlays and control groups. Needs root and
//! `busybox-static`; without root every test says so and passes.

mod exec;
mod hooks;
mod limits;
mod mounts;
mod pods;
mod process;
