//! Nodes in virtual machines: cgroup v2 with systemd, NFS storage, and systemd slices and scopes.
//!
//! Tests that boot machines are ignored by default (`make test-vm`); the others run against a scripted service manager.

#![allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves")]

mod node;
mod storage;
mod systemd;
