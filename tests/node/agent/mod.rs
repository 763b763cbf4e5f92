//! The agent binary on the scripted runtime: start, configuration, logs, metrics, and shutdown.
//!
//! Needs root, because an agent does; otherwise each test reports its name and is skipped.

mod callers;
mod clients;
mod command_line;
mod disk;
mod exit;
mod log;
mod main_port;
mod manifests;
mod metrics;
mod objects;
mod openapi;
mod plugins;
mod pods;
mod prometheus;
mod resource_policies;
mod restarts;
mod runtime;
mod service_manager;
mod shutdown;
mod sockets;
mod tools;
mod traces;
mod urls;

use berth_testkit::scripted_server::ScriptedServer;
