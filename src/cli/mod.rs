//! Command line interface: one file per command.
//!
//! Invoked as `kubelet` (also through a symbolic link), it behaves as kubelet: its flags, texts, and exit codes. Under
//! any other name it is `berth`, with its own commands, of which `run` takes kubelet's flags.

mod certs;
mod config;
mod cri;
mod drain;
mod images;
mod node;
mod run;
mod table;

use std::{ffi::OsString, path::Path, process::ExitCode};

use clap::{Parser, Subcommand};

use self::node::{devices, exec, logs, pods, top, topology, why};
use berth_config::{Personality, version};
use berth_runtime::images::unpacker::{child as unpacker, unpack_process::VERB as UNPACK};

/// Kubernetes node agent: a drop-in replacement for kubelet v1.36.
#[derive(Parser, Debug)]
#[command(name = "berth", version = version_line(), subcommand_required = true, arg_required_else_help = true)]
struct Berth {
    #[command(subcommand)]
    command: CliCommand,
}

#[derive(Subcommand, Debug)]
enum CliCommand {
    /// Run the node agent with kubelet's flags (see `berth run --help`)
    #[command(disable_help_flag = true)]
    Run {
        /// Flags of the kubelet
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "FLAGS")]
        flags: Vec<OsString>,
    },
    /// Print default configuration and validate configuration files
    Config {
        #[command(subcommand)]
        command: config::ConfigSubcommand,
    },
    /// Create certificates for a standalone node
    Certs {
        #[command(subcommand)]
        command: certs::CertsSubcommand,
    },
    /// Serve the embedded container runtime on a CRI socket, without the agent
    Cri(cri::Arguments),
    /// Manage images of the embedded container runtime
    Images {
        #[command(subcommand)]
        command: images::ImagesSubcommand,
    },
    /// List the pods of this node
    Pods(node::pods::Pods),
    /// Explain what a pod is waiting for and why it is in its current state
    Why(node::why::WhyArguments),
    /// List the devices of device plugins and the containers that have them
    Devices(node::devices::DevicesArguments),
    /// Show CPUs and memory by NUMA node, and the containers that have them
    Topology(node::topology::TopologyArguments),
    /// Print the logs of a container
    Logs(node::logs::Logs),
    /// Execute a command in a container
    Exec(node::exec::Exec),
    /// Display CPU and memory usage of this node and its pods
    Top(node::top::Top),
    /// Drain this node: stop its pods in graceful-shutdown order
    Drain(drain::DrainArguments),
    /// Print the version information
    Version,
    /// Unpack an image layer (started by the embedded runtime)
    #[command(name = UNPACK, hide = true)]
    Unpack {
        /// Unpack job
        job: String,
    },
}

fn version_line() -> String {
    format!("{} (kubelet {})", version::BERTH, version::VERSION)
}

/// Runs the command given by `args` (program name first).
pub fn main(args: impl Iterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.collect();
    let is_kubelet = args.first().and_then(|name| Path::new(name).file_name()).is_some_and(|name| name == "kubelet");
    if is_kubelet {
        return run::run(Personality::Kubelet, args.get(1..).unwrap_or_default());
    }
    let berth = match Berth::try_parse_from(args) {
        Ok(berth) => berth,
        Err(error) => {
            // Help and version are clap "errors" too; a failed print does not change the exit code.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(1));
        }
    };
    match berth.command {
        CliCommand::Run { flags } => run::run(Personality::Berth, &flags),
        CliCommand::Config { command } => config::run(&command),
        CliCommand::Certs { command } => certs::run(&command),
        CliCommand::Cri(arguments) => cri::run(arguments),
        CliCommand::Images { command } => images::run(command),
        CliCommand::Pods(wanted) => node::run(pods::list(wanted)),
        CliCommand::Why(wanted) => node::run(why::print_diagnostics(wanted)),
        CliCommand::Devices(wanted) => node::run(devices::list(wanted)),
        CliCommand::Topology(wanted) => node::run(topology::print_map(wanted)),
        CliCommand::Logs(wanted) => node::run(logs::print_log(wanted)),
        CliCommand::Exec(wanted) => node::run(exec::run(wanted)),
        CliCommand::Top(wanted) => node::run(top::list(wanted)),
        CliCommand::Drain(wanted) => node::run(drain::drain(wanted)),
        CliCommand::Unpack { job } => unpacker::main(&job),
        CliCommand::Version => {
            println!("berth {}", version_line());
            ExitCode::SUCCESS
        }
    }
}
