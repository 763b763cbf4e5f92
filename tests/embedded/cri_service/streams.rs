//! Exec, attach and port-forward of the embedded runtime behind its own listener, as `berth cri` has one: spec 09a §4, 04b
//! §3-§5. What is no business of a runtime's clients, but of the server's, is in `tests/it/server_streaming`.

mod attach;
mod commands;
mod forward;
mod socket;
mod world;
