//! What tests across rooms share: the scripted CRI, and builders of pods.
#![allow(dead_code, unused_imports, reason = "each test binary uses a part of the kit")]

pub mod agent;
pub mod api_server;
pub mod clock;
pub mod containerd;
pub mod disk;
pub mod embedded;
pub mod image;
pub mod kube_front;
pub mod leash;
pub mod main_port;
pub mod players;
pub mod pods;
pub mod process;
pub mod prometheus;
pub mod real;
pub mod scripted;
pub mod web;
