//! Paths of the programs under test: `berth` and `berth-shim`.
//!
//! Cargo builds both before the test programs and puts them one directory above those; nothing else has to be passed on.

use std::path::PathBuf;

/// The agent's binary, which is also the CLI and, by another name, `kubelet`.
///
/// # Panics
/// If it was not built.
pub fn berth() -> PathBuf {
    beside("berth").expect("cargo builds berth before the tests")
}

/// The shim that the embedded runtime starts for each pod.
///
/// # Panics
/// If it was not built.
pub fn shim() -> PathBuf {
    beside("berth-shim").expect("cargo builds berth-shim before the tests")
}

/// A program in the directory of the running test program, or in the one above.
pub fn beside(name: &str) -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    own.ancestors().skip(1).take(2).map(|directory| directory.join(name)).find(|path| path.is_file())
}
