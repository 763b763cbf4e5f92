//! The runtime's side of shims: unpacking and starting the program, and the client of its control socket.

pub mod client;
pub mod spawn;
