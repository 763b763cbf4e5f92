//! Tests of a shim process: the real loop, driven by the real client, starting plain processes.
//!
//! The test program is also the shim that it starts: with a directory as argument it runs the loop there, in a
//! single-threaded process.

mod fixture;
mod plain;
mod pods;
mod tests;

use std::{path::Path, process::ExitCode};

use libtest_mimic::Trial;

/// Creates the table of a file's tests by name.
#[macro_export]
macro_rules! shim_tests {
    ($($name:ident)*) => {
        /// All tests of this file.
        pub const ALL: &[$crate::Test] = &[$((stringify!($name), || $crate::shim::fixture::run($name))),*];
    };
}

/// All tests of the shim.
pub fn trials() -> impl Iterator<Item = Trial> {
    let all = [("tests", tests::ALL), ("pods", pods::ALL)];
    let all = all.into_iter().flat_map(|(module, tests)| tests.iter().map(move |test| (module, test)));
    all.map(|(module, (name, test))| {
        Trial::test(format!("shim::{module}::{name}"), move || {
            test();
            Ok(())
        })
    })
}

/// Runs a shim's loop in that directory.
pub fn serve(directory: &Path) -> ExitCode {
    match berth_shim::worker::run_on_stdin(directory, &plain::Plain) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}
