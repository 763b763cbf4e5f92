//! Our own container runtime: pods on a Linux machine that has nothing but this program.
//!
//! It speaks CRI v1, to the agent over memory and to others over a socket. Metadata is a directory per object; what runs
//! is held by one small process per pod, the shim, which survives the agent. Behaviour: spec 09, 09a, 09b.

pub mod applets;
pub mod images;
pub mod launch;
pub mod seccomp;
pub mod shim;
pub mod store;
