//! systemd as the maker of control groups: pods' slices, containers' scopes.
//!
//! Most of it runs on a service manager that is none ([`fake`]). What a real one makes of it is seen on a virtual machine
//! that is run by one ([`real`], [`inside`]).

mod fake;
mod inside;
mod real;
mod scopes;
mod slices;
