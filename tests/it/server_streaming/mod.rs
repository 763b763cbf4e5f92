//! `/exec`, `/attach`, `/portForward` and `/run`. What says something about a runtime's streams is asked twice, by the same
//! tests: of the streaming server of the scripted runtime, and of the embedded runtime, whose streams end in this process.
//! The rest is about runtimes that behave badly, and a real containerd.

#[macro_use]
mod world;

mod bad_clients;
mod bad_runtimes;
mod commands;
mod ends;
mod forwarding;
mod real;
mod requests;
