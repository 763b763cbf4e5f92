#![no_main]
//! See `memory_manager_state` in the targets.

#[path = "../../tests/fuzz_smoke/targets/mod.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::memory_manager_state(data));
