//! Component tests with scripted and real dependencies in one process, without agent or cluster.
//!
//! A test that needs root, cgroups, or a container runtime reports its name where it is skipped.

#![allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves")]

mod api_server;
mod citations;
mod cluster_objects;
mod config;
mod cri;
mod csi;
mod devices;
mod endpoints;
mod engine;
mod images;
mod language;
mod logs;
mod parser_bombs;
mod pleg;
mod request;
mod resources;
mod runtime;
mod selftest;
mod server;
mod server_auth;
mod server_streaming;
mod sockets;
mod sources;
mod stats;
mod tidy;
