//! Builds the parts from the configuration, adapts them to each other's ports, starts and stops them in order.

pub mod logging;

pub mod state_file;

use std::process::ExitCode;

use crate::config::{Loaded, StartupError};

/// Runs the agent until it is told to stop.
pub fn run(loaded: Loaded) -> ExitCode {
    match logging::start(&loaded.config.logging) {
        Ok(_handle) => logging::open(&loaded),
        Err(cause) => {
            eprintln!("{}", StartupError::Logging(cause.to_string()));
            return ExitCode::FAILURE;
        }
    }
    let missing = StartupError::Run("the parts of the agent are not put together yet".to_owned());
    tracing::error!(err = %missing, "command failed");
    ExitCode::FAILURE
}
