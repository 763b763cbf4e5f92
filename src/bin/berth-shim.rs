//! Shim binary for development and tests, built next to `berth`.

#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    berth_shim::program::main()
}
