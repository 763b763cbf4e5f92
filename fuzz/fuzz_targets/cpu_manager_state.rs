#![no_main]
//! See `cpu_manager_state` in the targets.

#[path = "../../tests/fuzz_smoke/targets/mod.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::cpu_manager_state(data));
