#![no_main]
//! See `allocate_response` in the targets.

#[path = "../../tests/fuzz_smoke/targets/mod.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::allocate_response(data));
