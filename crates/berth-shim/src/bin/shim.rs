//! The standalone `berth-shim` binary that `make release` builds: small, without the agent.

#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    berth_shim::program::main()
}
