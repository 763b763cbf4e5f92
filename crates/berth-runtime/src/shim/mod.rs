//! Shims from the runtime's side: unpacking and starting the binary, and the control socket client.

pub mod client;
pub mod launcher;
