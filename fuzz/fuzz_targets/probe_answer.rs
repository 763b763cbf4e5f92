#![no_main]
//! See `probe_answer` in the targets.

#[path = "../../tests/fuzz_smoke/targets/mod.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::probe_answer(data));
