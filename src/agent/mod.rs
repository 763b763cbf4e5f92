//! Builds the parts from the configuration, adapts them to each other's ports, starts and stops them in order.

pub mod state_file;
