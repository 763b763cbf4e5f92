//! Entry point of the `berth-shim` program and its modes.
//!
//! `berth-shim FOLDER` runs the event loop of that directory's pod, with the control socket as its standard input. With
//! another first argument it is the pod's process 1, which the loop itself starts, or the placeholder of a new scope.
//! Invoked as `pause` it is the program of the built-in `pause` image.

use std::{ffi::OsString, path::Path, process::ExitCode};

use crate::{child, child_launcher::ChildLauncher, pause, scope_placeholder, worker};

/// Runs the mode that the name and the arguments of this process select.
pub fn main() -> ExitCode {
    let mut arguments = std::env::args_os();
    if pause::is_called(arguments.next().as_deref()) {
        pause::run();
    }
    let arguments: Vec<OsString> = arguments.collect();
    match arguments.as_slice() {
        [first, number] if first == child::POD_INIT => child::pod_init(&number.to_string_lossy()),
        [first] if first == scope_placeholder::SCOPE_PLACEHOLDER => scope_placeholder::run(),
        [folder] if Path::new(folder).is_absolute() => match worker::run_on_stdin(Path::new(folder), &ChildLauncher) {
            Ok(()) => ExitCode::SUCCESS,
            Err(e) => {
                eprintln!("berth-shim: {e}");
                ExitCode::FAILURE
            }
        },
        _ => {
            eprintln!(
                "Usage: berth-shim FOLDER\n\nStarted by berth once per pod, with the control socket of the pod as standard input"
            );
            ExitCode::FAILURE
        }
    }
}
