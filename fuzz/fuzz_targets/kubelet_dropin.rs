#![no_main]
//! See `kubelet_dropin` in the targets.

#[path = "../../tests/fuzz_smoke/targets/mod.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::kubelet_dropin(data));
