//! Entry point: passes the arguments to the CLI.

use std::process::ExitCode;

use berth_sys::{heap::Jemalloc, names};

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

fn main() -> ExitCode {
    names::use_files_and_dns();
    berth::cli::main(std::env::args_os())
}
