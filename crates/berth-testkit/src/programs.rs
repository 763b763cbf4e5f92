//! Paths of the built `berth` and `berth-shim`, for agents in tests and for copies into test machines.
//!
//! Cargo builds both before the test programs and puts them one directory above those; no configuration is needed.

use std::path::PathBuf;

/// The agent binary, which is also the CLI and, under the name `kubelet`, the drop-in replacement.
///
/// # Panics
/// It was not built.
pub fn berth() -> PathBuf {
    beside("berth").expect("berth not found next to the test binary")
}

/// The shim binary that the embedded runtime starts for each pod.
///
/// # Panics
/// It was not built.
pub fn shim() -> PathBuf {
    beside("berth-shim").expect("berth-shim not found next to the test binary")
}

/// Program in the directory of the running test program, or in its parent directory.
pub fn beside(name: &str) -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    own.ancestors().skip(1).take(2).map(|directory| directory.join(name)).find(|path| path.is_file())
}
