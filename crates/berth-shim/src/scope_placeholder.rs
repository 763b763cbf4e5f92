//! Placeholder process of a systemd scope, which systemd neither starts nor keeps without a process.
//!
//! It lives from the creation of a cgroup until the container runs there, and exits with its agent. Spec 09a §9.3 names
//! the container's own process; that one is a child of the shim, created in the cgroup that must exist before it.

use std::{
    io::{self, Read},
    path::Path,
    process::{Child, Command, ExitCode, Stdio},
};

/// Argument of the shim's program that selects this mode.
pub const SCOPE_PLACEHOLDER: &str = "scope-placeholder";

/// A placeholder process; killed when this is dropped.
#[derive(Debug)]
pub struct ScopePlaceholder(Child);

impl ScopePlaceholder {
    /// Starts a placeholder by the shim's program. Blocks briefly.
    ///
    /// # Errors
    /// If the program cannot be executed.
    pub fn start(program: &Path) -> io::Result<Self> {
        let mut command = Command::new(program);
        command.arg(SCOPE_PLACEHOLDER).env_clear().current_dir("/").stdin(Stdio::piped());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().map(Self)
    }

    /// PID of the placeholder.
    pub fn process(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for ScopePlaceholder {
    fn drop(&mut self) {
        // It may have been killed with its cgroup; the kill is immediate.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Main function of the placeholder: waits until the agent closes its stdin.
pub fn run() -> ExitCode {
    let mut buffer = [0; 16];
    let mut from = io::stdin().lock();
    // Nothing is ever written.
    while from.read(&mut buffer).is_ok_and(|count| count > 0) {}
    ExitCode::SUCCESS
}
