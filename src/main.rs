//! Arguments to commands, nothing else.

use std::process::ExitCode;

use berth::sys::allocations::Sampled;

#[global_allocator]
static ALLOCATOR: Sampled = Sampled;

fn main() -> ExitCode {
    berth::cli::main(std::env::args_os())
}
