//! A shim as a process of its own: the real loop, driven by the real client, starting plain processes.
//!
//! This program is also the shim it starts: with the argument of a folder it runs the loop there. Hence no test harness:
//! the loop needs a process with one thread.

#[path = "../kit/mod.rs"]
mod kit;

mod plain;
mod pods;
mod rig;
mod tests;

use std::{panic::catch_unwind, path::Path, process::ExitCode};

/// Makes the table of a file's tests by their names.
#[macro_export]
macro_rules! tests {
    ($($name:ident)*) => {
        /// All tests by their names.
        pub const ALL: &[(&str, fn())] = &[$((stringify!($name), || $crate::rig::run($name))),*];
    };
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(folder) = arguments.first().filter(|first| first.starts_with('/')) {
        return run_shim(Path::new(folder));
    }
    let wanted: Vec<&String> = arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|w| name.contains(w.as_str()));
    if arguments.iter().any(|argument| argument == "--list") {
        all().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let mut failed = Vec::new();
    for (name, test) in all().filter(|(name, _)| is_wanted(name)) {
        let verdict = if catch_unwind(test).is_ok() { "ok" } else { "FAILED" };
        println!("test {name} ... {verdict}");
        failed.extend((verdict != "ok").then_some(*name));
    }
    if failed.is_empty() {
        return ExitCode::SUCCESS;
    }
    println!("failed: {}", failed.join(", "));
    ExitCode::FAILURE
}

fn all() -> impl Iterator<Item = &'static (&'static str, fn())> {
    tests::ALL.iter().chain(pods::ALL)
}

fn run_shim(folder: &Path) -> ExitCode {
    match berth::embedded::shim::worker::run_on_stdin(folder, &plain::Plain) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}
