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

    use nix::{
        sys::signal::{Signal, kill, raise},
        unistd::getppid,
    };

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
        // Only a test requests this, and observes whether it was done.
        let _ = match act {
            // A signal to the process may reach another thread first, and this one would go on for a moment.
            "kill" => raise(Signal::SIGKILL),
            "halt" => raise(Signal::SIGSTOP),
            // In a PID namespace of its own a process does not see its parent.
            "kill-parent" => match getppid() {
                parent if parent.as_raw() > 1 => kill(parent, Signal::SIGKILL),
                _ => return,
            },
            _ => return,
        };
    }
}
