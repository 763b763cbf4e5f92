//! Nodes in virtual machines: cgroup v2 with systemd, NFS storage, and systemd's own slices and scopes.
//!
//! Machines boot in tests that are ignored by default (`make test-vm`); the rest runs against a scripted service manager.

#![allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves")]

mod node;
mod storage;
mod systemd;
