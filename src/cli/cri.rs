//! `berth cri`: serves the embedded runtime on a socket, for crictl and other agents.

use std::process::ExitCode;

use crate::wiring;

/// Where it is served.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// Endpoint of the CRI socket [default: `serveSocket` of the configuration, or unix:///run/berth/cri.sock]
    #[arg(long, value_name = "ENDPOINT")]
    socket: Option<String>,
}

/// Serves until stopped by a signal; pods keep running.
pub fn run(arguments: Arguments) -> ExitCode {
    wiring::embedded::serve(arguments.socket)
}
