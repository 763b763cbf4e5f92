//! `berth run` and `kubelet`: from the command line to a running agent.

use std::{ffi::OsString, io::Write, process::ExitCode};

use tracing::error;

use crate::{logging, wiring};
use berth_config::{HostFacts, Notice, Personality, StartupAction, StartupError, fields::LoggingConfiguration};

/// Runs the agent with kubelet's flags.
pub fn run(personality: Personality, flags: &[OsString]) -> ExitCode {
    let mut loading = berth_config::load(personality, flags, &HostFacts::probe());
    // A consumer of JSON logs expects no other text on the stream.
    let deprecations = if loading.logging.format == "json" {
        loading.deprecations.drain(..).map(Notice::DeprecatedFlag).collect()
    } else {
        for line in &loading.deprecations {
            // The agent starts even if standard error is not writable.
            let _ = writeln!(std::io::stderr(), "{line}");
        }
        Vec::new()
    };
    match loading.outcome {
        Ok(StartupAction::Print(text)) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Ok(StartupAction::Run(mut loaded)) => {
            loaded.notices.splice(0..0, deprecations);
            wiring::run(*loaded)
        }
        Err(failure) => {
            loading.notices.splice(0..0, deprecations);
            fail(&failure, &loading.logging, &loading.notices)
        }
    }
}

/// Reports a startup failure as kubelet does: one log line.
fn fail(failure: &StartupError, log: &LoggingConfiguration, notices: &[Notice]) -> ExitCode {
    if let Err(cause) = logging::start(log) {
        eprintln!("{failure} ({cause})");
        return ExitCode::FAILURE;
    }
    notices.iter().for_each(logging::log_notice);
    error!(err = %failure, "command failed");
    ExitCode::FAILURE
}
