//! Benchmark of kubelet-compatible binaries: resource cost and latency, as a table with bars.
//!
//! Drives the binary through kubelet's own interface on one of three environments: the scripted CRI of the test kit (in
//! this process, on a Unix socket, with the real clock), where all elapsed time is the agent's own; a private
//! containerd, where a plain CRI client does the same work in the same run (column `raw`) to show the runtime's share;
//! and the scripted CRI beside the test API server, which logs when each request arrived. With `--against`, two
//! binaries alternate within one run.
//!
//! `make bench`, or `cargo bench --bench agent -- --help`.

mod agent;
mod bytes;
mod churn;
mod cluster;
mod cluster_outage;
mod cluster_pods;
mod containerd_cost;
mod containerd_pods;
mod devices;
mod embedded_image;
mod embedded_pods;
mod events;
mod figures;
mod followers;
mod handshakes;
mod health;
mod manifest;
mod measurements;
mod options;
mod pages;
mod plain;
mod private_ca;
mod process;
mod raw;
mod report;
mod rotation_and_shutdown;
mod scripted_cost;
mod scripted_runtime;
mod scripted_starts;
mod streams;
mod volumes;

use std::process::ExitCode;

use options::{Invocation, Options};

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(Invocation::Measure(options)) => options,
        Ok(Invocation::Help(text)) => {
            println!("{text}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("{error:#}");
            return ExitCode::FAILURE;
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    match runtime.map_err(anyhow::Error::from).and_then(|runtime| runtime.block_on(measurements::all(&options))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("benchmark failed: {error:#}");
            ExitCode::FAILURE
        }
    }
}
