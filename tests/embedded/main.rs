//! The embedded runtime on a real kernel: its CRI service, images, launch of containers, networks, and seccomp.

mod cri_service;
mod images;
mod launch;
mod network;
mod plans;
mod seccomp;
