//! Builds the parts from the configuration, adapts them to each other's ports, starts and stops
//! them in order. The only room that knows all others. Behaviour: spec 01 §8, §9.

mod adapters;
mod build;
mod events;
mod life;
pub mod logging;
mod memory;
mod pages;
mod process;
mod server;
mod server_logs;
mod settings;
mod standalone;
pub mod state_file;
mod watchdog;

pub use life::run;
