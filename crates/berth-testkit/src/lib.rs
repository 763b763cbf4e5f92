//! Test kit: scripted and real runtimes, test API server, clients, virtual machines, pod builders.
//!
//! A separate crate, so that it compiles once for all test programs and its own tests run once.

#![allow(clippy::new_without_default, reason = "`new` starts servers and takes ports: nobody wants that by default")]

pub mod agent;
pub mod api_client;
pub mod api_server;
pub mod clock;
pub mod containerd;
pub mod cri_calls;
pub mod csi;
pub mod device_plugin;
pub mod dra_driver;
pub mod embedded;
pub mod image;
pub mod kill_switch;
pub mod kube_front;
pub mod launch_fixture;
pub mod leak_test;
pub mod machine;
pub mod machine_systemd;
pub mod main_port;
pub mod misbehaving_server;
pub mod otlp_collector;
pub mod plans;
pub mod plugin_server;
pub mod pods;
pub mod port_fakes;
pub mod process;
pub mod programs;
pub mod prometheus;
pub mod real;
pub mod reservation;
pub mod runtimes;
pub mod scripted_cri;
pub mod scripted_server;
pub mod small_tmpfs;
pub mod streams;
pub mod subnet;
