//! `berth cri`: serves the embedded runtime on a socket, for crictl and other agents.

use std::process::ExitCode;

use crate::wiring;

/// Where it is served.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// Socket to serve, `unix:///run/berth/cri.sock` where nothing is said
    #[arg(long, value_name = "ENDPOINT")]
    socket: Option<String>,
}

/// Serves until stopped by a signal; pods keep running.
pub fn run(arguments: Arguments) -> ExitCode {
    wiring::embedded::serve(arguments.socket)
}
