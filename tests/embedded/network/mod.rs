//! Pod networks on a real kernel: bridge, links, packet filter, and CNI plugins.
//!
//! Every test has its own machine, a network namespace, so that this machine's network stays unchanged. The tests need
//! root and report their names where they are skipped.

mod builtin;
mod machine;
mod many;
mod plugins;
mod ports;
mod recovery;
