//! A node as most are: cgroup v2 alone, systemd as process 1 with logind beside it, and the agent as its package starts it.
//!
//! One virtual machine of the kit's is booted for all of it ([`boot`]). Within, this program is an API server and a user of it
//! ([`inside`]), and looks at what pods of busybox are given and lose ([`groups`], [`memory`], [`pressure`]), at what the
//! service manager sees of the agent ([`service`]), and at the end of the machine ([`end`]), which is its own.

mod boot;
mod end;
mod groups;
mod inside;
mod memory;
mod pressure;
mod service;
