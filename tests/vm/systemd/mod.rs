//! systemd cgroup driver: slices of pods, and scopes of containers.
//!
//! Most tests run on a fake service manager ([`fake`]). A real systemd is tested in a virtual machine ([`real`],
//! [`inside`]).

mod fake;
mod inside;
mod real;
mod scopes;
mod slices;
