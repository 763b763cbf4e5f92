//! Failpoints: named steps at which a test kills or stops this process; compiled out in releases.
//!
//! The environment variable [`VARIABLE`] names a file with a step and an action. The process that reaches the step
//! removes the file and performs the action: one process only, once. Without the variable nothing is read.

/// Environment variable with the path of the file.
pub const VARIABLE: &str = "BERTH_STEPS";

/// Failpoint: performs the action configured for this step.
#[cfg(not(debug_assertions))]
pub const fn reached(_: &str) {}

/// Passes the variable on, for a program that is started with an empty environment.
#[cfg(not(debug_assertions))]
pub fn pass_variable(_: impl FnOnce(&str, &std::ffi::OsStr)) {}

#[cfg(debug_assertions)]
pub use enabled::{pass_variable, reached};

#[cfg(debug_assertions)]
mod enabled {
    use std::{env, ffi::OsStr, fs, path::PathBuf, sync::OnceLock};

    use rustix::process::{Pid, Signal, getpid, getppid, kill_process};

    use super::VARIABLE;

    static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();

    fn file() -> Option<&'static PathBuf> {
        FILE.get_or_init(|| env::var_os(VARIABLE).map(PathBuf::from)).as_ref()
    }

    /// Passes the variable on, for a program that is started with an empty environment.
    pub fn pass_variable(pass: impl FnOnce(&str, &OsStr)) {
        if let Some(file) = file() {
            pass(VARIABLE, file.as_os_str());
        }
    }

    /// Failpoint: performs the action configured for this step.
    pub fn reached(step: &str) {
        let Some(file) = file() else { return };
        let Ok(text) = fs::read_to_string(file) else { return };
        let Some((wanted, act)) = text.trim().split_once(' ') else { return };
        if wanted == step && fs::remove_file(file).is_ok() {
            perform(act);
        }
    }

    fn perform(act: &str) {
        let (whom, signal) = match act {
            "kill" => (Some(getpid()), Signal::KILL),
            "halt" => (Some(getpid()), Signal::STOP),
            // In a PID namespace of its own a process does not see its parent.
            "kill-parent" => (getppid().filter(|parent| *parent != Pid::INIT), Signal::KILL),
            _ => return,
        };
        // Only a test requests this, and observes whether it was done.
        let _ = whom.map(|whom| kill_process(whom, signal));
    }
}
