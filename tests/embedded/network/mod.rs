//! Pods' networks on the real kernel: bridge, links, packet filter, plugins. Every test has a machine of its own, a network
//! namespace, so that this machine's stays as it is. They need root and are skipped by name without.

mod builtin;
mod ground;
mod many;
mod plugins;
mod ports;
mod recovery;
