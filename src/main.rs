//! Arguments to commands, nothing else.

use std::process::ExitCode;

fn main() -> ExitCode {
    berth::cli::main(std::env::args_os())
}
