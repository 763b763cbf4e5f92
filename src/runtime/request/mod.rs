//! Builds the CRI requests for a sandbox and its containers. Pure.
//!
//! Input: the pod, and what the preparer has read (resolv.conf, environment, volumes, node). Output:
//! the messages of `runtime.v1`, whose generated types are the only foreign values here.
//!
//! | File | Part |
//! |---|---|
//! | [`sandbox`] | a sandbox's configuration, from the parts below |
//! | [`container`] | a container's configuration: labels, annotations, command, log path |
//! | [`dns`] | resolv.conf, policies, limits |
//! | [`ports`] | port mappings |
//! | [`userns`] | user namespaces |
//! | [`mounts`] | CRI mounts and devices of a container's volumes |
//! | [`hosts`] | content of the hosts file |
//! | [`security`] | users, groups, capabilities, seccomp, AppArmor, namespaces |
//! | [`resources`] | shares, quota, memory, huge pages, OOM score, swap |
//!
//! Implements spec 03a §5-6.

pub mod container;
pub mod dns;
pub mod hosts;
pub mod mounts;
pub mod ports;
pub mod resources;
pub mod sandbox;
pub mod security;
pub mod userns;
