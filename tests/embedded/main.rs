//! The embedded runtime on a real kernel: its CRI service, images, launch of containers, networks, and seccomp.

#![allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves")]

mod cri_service;
mod images;
mod launch;
mod network;
mod plans;
mod seccomp;
