//! The shim as development and tests use it, beside `berth`.

#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    berth_shim::program::main()
}
