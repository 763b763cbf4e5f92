//! The agent binary as a process, standalone and as a node of the test API server.
//!
//! Its runtime is scripted.

mod agent;
mod cluster;
