//! What tests across rooms share: runtimes, scripted and real, their clients, and builders of pods.
#![allow(dead_code, unused_imports, unused_macros, reason = "each test binary uses a part of the kit")]

pub mod agent;
pub mod alone;
pub mod bench;
pub mod clock;
pub mod containerd;
pub mod cri_calls;
pub mod csi;
pub mod disk;
pub mod embedded;
pub mod ground;
pub mod image;
pub mod leash;
pub mod machine;
pub mod machine_systemd;
pub mod main_port;
pub mod plans;
pub mod players;
pub mod pods;
pub mod process;
pub mod prometheus;
pub mod real;
#[macro_use]
pub mod runtimes;
pub mod scripted;
pub mod streams;
pub mod web;
