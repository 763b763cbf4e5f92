//! Exec, attach, and port-forward of the embedded runtime behind its own listener, as in `berth cri`.
//!
//! Behavior: spec 09a §4, 04b §3-§5. Tests of the server, as opposed to the runtime's clients, are in
//! `tests/it/server_streaming`.

mod attach;
mod commands;
mod fixture;
mod port_forward;
mod socket;
