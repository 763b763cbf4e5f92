#![no_main]
//! See `kernel_log` in the targets.

#[path = "../../tests/fuzz_smoke/targets/mod.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::kernel_log(data));
