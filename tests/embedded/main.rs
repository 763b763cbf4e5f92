//! The embedded runtime on a real kernel: CRI service, images, container launch, networks, and seccomp.

#![allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves")]

mod cri_service;
mod images;
mod launch;
mod network;
mod plans;
mod seccomp;
