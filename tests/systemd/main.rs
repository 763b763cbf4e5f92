//! systemd as the maker of control groups: pods' slices, containers' scopes.
//!
//! Most of it runs on a service manager that is none ([`fake`]). What a real one makes of it is seen on a virtual machine
//! that is run by one ([`real`], [`inside`]).

mod fake;
mod inside;
#[path = "../kit/machine.rs"]
mod machine;
#[path = "../kit/machine_systemd.rs"]
mod machine_systemd;
#[allow(dead_code, reason = "the kit is shared")]
#[path = "../kit/pods.rs"]
mod pods;
mod real;
mod scopes;
mod slices;
