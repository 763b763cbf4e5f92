//! What people type: one file per command.

use std::{ffi::OsString, process::ExitCode};

/// Runs the command that `args` (program name first) ask for.
pub fn main(_args: impl Iterator<Item = OsString>) -> ExitCode {
    ExitCode::FAILURE
}
