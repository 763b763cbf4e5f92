//! `/exec`, `/attach`, `/portForward`, and `/run`.
//!
//! Tests about a runtime's streams run twice: on the streaming server of the scripted runtime, and on the embedded
//! runtime, whose streams end in this process. The others are about misbehaving runtimes, and a real containerd.

#[macro_use]
mod fixture;

mod bad_clients;
mod bad_runtimes;
mod commands;
mod forwarding;
mod real;
mod requests;
mod stream_end;
