//! What is asked of CRI for a sandbox and its containers. Pure.
//!
//! In: the pod, and what the preparer has read (resolv.conf, environment, volumes, node). Out:
//! the messages of `runtime.v1`, whose generated types are the only foreign values here.
//!
//! | File | Part |
//! |---|---|
//! | [`sandbox`] | a sandbox's configuration, from the parts below |
//! | [`container`] | a container's configuration: labels, annotations, command, log path |
//! | [`dns`] | resolv.conf, policies, limits |
//! | [`ports`] | port mappings |
//! | [`userns`] | user namespaces |
//! | [`mounts`] | what each volume mount becomes |
//! | [`hosts`] | text of the hosts file |
//! | [`security`] | users, groups, capabilities, seccomp, AppArmor, namespaces |
//! | [`resources`] | shares, quota, memory, huge pages, OOM score, swap |
//!
//! Behaviour: spec 03a §5-6.

pub mod container;
pub mod dns;
pub mod hosts;
pub mod mounts;
pub mod ports;
pub mod resources;
pub mod sandbox;
pub mod security;
pub mod userns;
