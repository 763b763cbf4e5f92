//! Test kit: scripted and real runtimes, test API server, clients, virtual machines, pod builders.
//!
//! A separate crate, so that it compiles once for all test programs and its own tests run once.

#![allow(clippy::new_without_default, reason = "`new` starts servers and takes ports: nobody wants that by default")]

pub mod agent;
pub mod alone;
pub mod api_client;
pub mod api_server;
pub mod bench;
pub mod clock;
pub mod containerd;
pub mod cri_calls;
pub mod csi;
pub mod disk;
pub mod embedded;
pub mod ground;
pub mod image;
pub mod kube_front;
pub mod leash;
pub mod machine;
pub mod machine_systemd;
pub mod main_port;
pub mod plans;
pub mod players;
pub mod pods;
pub mod process;
pub mod programs;
pub mod prometheus;
pub mod real;
pub mod reservation;
pub mod runtimes;
pub mod scripted;
pub mod streams;
pub mod subnet;
pub mod web;
