//! `berth run`, and kubelet itself: from the command line to a running agent.

use std::{ffi::OsString, io::Write, process::ExitCode};

use tracing::error;

use crate::{logging, wiring};
use berth_config::{HostFacts, Notice, Personality, Request, StartupError, fields::LoggingConfiguration};

/// Runs the agent with kubelet's flags.
pub fn run(personality: Personality, flags: &[OsString]) -> ExitCode {
    let mut loading = berth_config::load(personality, flags, &HostFacts::probe());
    // Whoever reads JSON lines wants nothing else on the stream.
    let deprecations = if loading.logging.format == "json" {
        loading.deprecations.drain(..).map(Notice::DeprecatedFlag).collect()
    } else {
        for line in &loading.deprecations {
            // Where nobody can read it, the agent starts all the same.
            let _ = writeln!(std::io::stderr(), "{line}");
        }
        Vec::new()
    };
    match loading.outcome {
        Ok(Request::Print(text)) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Ok(Request::Run(mut loaded)) => {
            loaded.notices.splice(0..0, deprecations);
            wiring::run(*loaded)
        }
        Err(failure) => {
            loading.notices.splice(0..0, deprecations);
            fail(&failure, &loading.logging, &loading.notices)
        }
    }
}

/// Tells why there is no agent the way the reference does: one line of the log.
fn fail(failure: &StartupError, log: &LoggingConfiguration, notices: &[Notice]) -> ExitCode {
    if let Err(cause) = logging::start(log) {
        eprintln!("{failure} ({cause})");
        return ExitCode::FAILURE;
    }
    notices.iter().for_each(logging::tell);
    error!(err = %failure, "command failed");
    ExitCode::FAILURE
}
