//! A process that does nothing but be there: systemd starts no scope without one, and ends it with the last.
//!
//! It lives from the making of a group until what is to run there does, and ends with its daemon. Spec 09a §9.3 names the
//! container's own process; that one is a child of the shim, born into the group that must be there before it.

use std::{
    io::{self, Read},
    path::Path,
    process::{Child, Command, ExitCode, Stdio},
};

/// The shim's argument that makes it one.
pub const KEEPER: &str = "keeper";

/// A keeper of ours; gone when this is dropped.
#[derive(Debug)]
pub struct Keeper(Child);

impl Keeper {
    /// Starts one, by the shim's program. Blocks a little.
    ///
    /// # Errors
    /// The program cannot be executed.
    pub fn start(program: &Path) -> io::Result<Self> {
        let mut command = Command::new(program);
        command.arg(KEEPER).env_clear().current_dir("/").stdin(Stdio::piped());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().map(Self)
    }

    /// Its process.
    pub fn process(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // It may have been killed with its group, and is gone at once.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The keeper itself: waits until its daemon lets go.
pub fn run() -> ExitCode {
    let mut buffer = [0; 16];
    let mut from = io::stdin().lock();
    // Nothing is ever said.
    while from.read(&mut buffer).is_ok_and(|count| count > 0) {}
    ExitCode::SUCCESS
}
