//! Entry point: passes the arguments to the CLI.

use std::process::ExitCode;

use berth_sys::{jemalloc::Jemalloc, nss};

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

fn main() -> ExitCode {
    nss::use_files_and_dns();
    berth::cli::main(std::env::args_os())
}
