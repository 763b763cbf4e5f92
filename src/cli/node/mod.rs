//! `berth pods`, `why`, `devices`, `topology`, `logs`, `exec` and `top`: clients of the node's API.
//!
//! They authenticate with the local administrator's certificate.

pub(super) mod devices;
pub(super) mod exec;
pub(super) mod logs;
mod node_client;
mod pod_lookup;
mod pod_table;
pub(super) mod pods;
mod session;
mod terminal;
pub(super) mod top;
pub(super) mod topology;
pub(super) mod why;

use std::{
    io::{self, IsTerminal, Write},
    process::ExitCode,
};

use anyhow::{Context, Result};
use clap::ValueEnum;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::signal::unix::{SignalKind, signal};

/// Exit code that shells use for an interrupted program (128 + SIGINT).
const INTERRUPTED: u8 = 130;
/// Exit codes for SIGTERM and SIGHUP.
const TERMINATED: u8 = 143;
const HUNG_UP: u8 = 129;

/// How something is shown.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum OutputFormat {
    /// Human-readable table
    #[default]
    Table,
    /// Table with additional columns
    Wide,
    /// Complete JSON document
    Json,
}

/// Runs a command to its exit code; a signal ends it.
pub(super) fn run(command: impl Future<Output = Result<ExitCode>>) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(async {
        tokio::select! {
            outcome = command => outcome.unwrap_or_else(|error| {
                eprintln!("error: {error:#}");
                ExitCode::FAILURE
            }),
            _ = tokio::signal::ctrl_c() => ExitCode::from(INTERRUPTED),
            // Handled, so that the terminal is restored before exit.
            () = wait_for_signal(SignalKind::terminate()) => ExitCode::from(TERMINATED),
            () = wait_for_signal(SignalKind::hangup()) => ExitCode::from(HUNG_UP),
        }
    });
    // A blocking read of standard input ends with the process.
    runtime.shutdown_background();
    code
}

/// Formats a document of the node: indented JSON, or the text that `render` makes of it.
fn format_document<T: DeserializeOwned>(
    document: Value,
    output: OutputFormat,
    render: impl FnOnce(T) -> String,
) -> Result<String> {
    if output == OutputFormat::Json {
        return Ok(format!("{}\n", serde_json::to_string_pretty(&document)?));
    }
    serde_json::from_value(document).map(render).context("cannot parse the node's response")
}

fn print(text: impl AsRef<[u8]>) -> Result<OutputReader> {
    show(io::stdout().lock(), text.as_ref())
}

/// Writes and flushes; a closed pipe is not an error.
fn show(mut out: impl Write, text: &[u8]) -> Result<OutputReader> {
    match out.write_all(text).and_then(|()| out.flush()) {
        Ok(()) => Ok(OutputReader::Listens),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(OutputReader::Left),
        Err(error) => Err(anyhow::Error::from(error).context("cannot write to standard output")),
    }
}

/// Whether our output still has a reader.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum OutputReader {
    Listens,
    Left,
}

/// Whether standard output is a terminal and `NO_COLOR` is unset or empty.
fn in_colour() -> bool {
    io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Waits for a signal; never returns if its handler cannot be installed.
async fn wait_for_signal(kind: SignalKind) {
    match signal(kind) {
        Ok(mut signals) => drop(signals.recv().await),
        Err(_) => std::future::pending().await,
    }
}
