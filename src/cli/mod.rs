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

use self::node::{exec, logs, pods, top, why};
use berth_config::{Personality, version};
use berth_runtime::images::apply::{child as unpacker, unpack_process::VERB as UNPACK};

/// A node agent: a drop-in for kubelet v1.36.
#[derive(Parser, Debug)]
#[command(name = "berth", version = version_line(), subcommand_required = true, arg_required_else_help = true)]
struct Berth {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Run the agent; takes kubelet's flags (`berth run --help` lists them)
    #[command(disable_help_flag = true)]
    Run {
        /// Flags of kubelet
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "FLAGS")]
        flags: Vec<OsString>,
    },
    /// Look at configuration files
    Config {
        #[command(subcommand)]
        command: config::Command,
    },
    /// Make certificates for a node without a cluster
    Certs {
        #[command(subcommand)]
        command: certs::Command,
    },
    /// Serve the embedded runtime on a socket, without an agent
    Cri(cri::Arguments),
    /// The images of the embedded runtime
    Images {
        #[command(subcommand)]
        command: images::Command,
    },
    /// List the pods of this node
    Pods(node::pods::Pods),
    /// Tell what a pod waits for, and why it is as it is
    Why(node::why::WhyArguments),
    /// Print the log of a container
    Logs(node::logs::Logs),
    /// Run a command in a container
    Exec(node::exec::Exec),
    /// Tell what the pods of this node use
    Top(node::top::Top),
    /// Let the pods of this node go as at its shutdown, without one
    Drain(drain::DrainArguments),
    /// Print the version
    Version,
    /// What the runtime starts for each layer
    #[command(name = UNPACK, hide = true)]
    Unpack {
        /// What is to be done
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
        Err(told) => {
            // Help and version are clap "errors" too; a failed print does not change the exit code.
            let _ = told.print();
            return ExitCode::from(u8::try_from(told.exit_code()).unwrap_or(1));
        }
    };
    match berth.command {
        Command::Run { flags } => run::run(Personality::Berth, &flags),
        Command::Config { command } => config::run(&command),
        Command::Certs { command } => certs::run(&command),
        Command::Cri(arguments) => cri::run(arguments),
        Command::Images { command } => images::run(command),
        Command::Pods(wanted) => node::run(pods::list(wanted)),
        Command::Why(wanted) => node::run(why::print_diagnostics(wanted)),
        Command::Logs(wanted) => node::run(logs::print_log(wanted)),
        Command::Exec(wanted) => node::run(exec::run(wanted)),
        Command::Top(wanted) => node::run(top::list(wanted)),
        Command::Drain(wanted) => node::run(drain::drain(wanted)),
        Command::Unpack { job } => unpacker::main(&job),
        Command::Version => {
            println!("berth {}", version_line());
            ExitCode::SUCCESS
        }
    }
}
