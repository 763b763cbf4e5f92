//! A typical node in a virtual machine: cgroup v2, systemd with logind, and the packaged agent.
//!
//! One virtual machine of the test kit is booted for all checks ([`boot`]). In it, this program is an API server and
//! its user ([`inside`]), and checks the cgroups and evictions of busybox pods ([`groups`], [`memory`], [`memory_qos`],
//! [`pressure`]), the agent as a systemd service ([`service`], [`system_cgroups`]), CPUs and memory of NUMA nodes
//! ([`pinning`]), and the shutdown of the machine ([`shutdown`]).

mod boot;
mod groups;
mod inside;
mod memory;
mod memory_qos;
mod pinning;
mod pressure;
mod service;
mod shutdown;
mod system_cgroups;
