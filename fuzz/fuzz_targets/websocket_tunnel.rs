#![no_main]
//! See `websocket_tunnel` in the targets.

#[path = "../../tests/fuzz_smoke/targets/mod.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::websocket_tunnel(data));
