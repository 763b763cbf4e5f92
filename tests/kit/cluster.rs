//! The kit with the test API server, which is large: test programs without a cluster take `mod.rs`
//! and are built in half the time.
#![allow(dead_code, unused_imports, reason = "each test binary uses a part of the kit")]

pub mod api_client;
pub mod api_server;
pub mod kube_front;
#[path = "mod.rs"]
mod plain;

pub use plain::*;
