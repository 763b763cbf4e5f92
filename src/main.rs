//! Arguments to commands, nothing else.

use std::process::ExitCode;

use berth_sys::{allocations::Sampled, names};

#[global_allocator]
static ALLOCATOR: Sampled = Sampled;

fn main() -> ExitCode {
    names::use_files_and_dns();
    berth::cli::main(std::env::args_os())
}
