//! The binary itself on the scripted runtime: what an operator can do to it, and what it says and
//! keeps then. Needs root, because an agent does; otherwise each test is skipped by name.

mod callers;
mod clients;
mod command_line;
mod disk;
mod ends;
mod log;
mod main_port;
mod manifests;
mod metrics;
mod objects;
mod openapi;
mod pods;
mod prometheus;
mod restarts;
mod runtime;
mod service_manager;
mod shutdown;
mod sockets;
mod tools;
mod urls;

use berth_testkit::ground::Ground;
