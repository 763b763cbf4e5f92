//! The shim as `make release` builds it: small, and without the agent.

#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    berth_shim::program::main()
}
