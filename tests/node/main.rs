//! The agent's binary as a process: on its own, and as a node of the test API server. Its runtime is scripted.

mod agent;
mod cluster;
