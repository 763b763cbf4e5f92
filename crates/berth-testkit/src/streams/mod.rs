//! Exec, attach, and port-forward tests: protocol clients, streaming endpoints, and TCP servers.
//!
//! Shared by the tests of all runtimes.

pub mod clients;
pub mod endpoints;
pub mod ports;
