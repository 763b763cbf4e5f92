//! Program of the built-in `pause` image: keeps a pod's namespaces alive, reaps orphans, and exits on a signal.
//!
//! Implements spec 09b §8.

use std::{ffi::OsStr, path::Path, process};

use nix::{
    sys::{
        signal::{SigSet, Signal},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};

/// Name of invocation that selects this program.
pub const NAME: &str = "pause";

/// Whether this process was invoked by that name.
pub fn is_called(program: Option<&OsStr>) -> bool {
    program.and_then(|program| Path::new(program).file_name()).is_some_and(|name| name == NAME)
}

/// Waits for signals; exits on SIGTERM and SIGINT.
pub fn run() -> ! {
    let mut signals = SigSet::empty();
    [Signal::SIGTERM, Signal::SIGINT, Signal::SIGCHLD].into_iter().for_each(|signal| signals.add(signal));
    if signals.thread_block().is_err() {
        process::exit(1);
    }
    loop {
        match signals.wait() {
            Ok(Signal::SIGCHLD) => reap(),
            Ok(_) => process::exit(0),
            Err(_) => process::exit(1),
        }
    }
}

fn reap() {
    while !matches!(waitpid(Pid::from_raw(-1), Some(WaitPidFlag::WNOHANG)), Ok(WaitStatus::StillAlive) | Err(_)) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pause_is_known_by_the_name_it_is_called_by() {
        for (program, expected) in
            [("/bin/pause", true), ("pause", true), ("/usr/local/bin/berth", false), ("berth-shim", false), ("", false)]
        {
            assert_eq!(is_called(Some(OsStr::new(program))), expected, "{program}");
        }
        assert!(!is_called(None));
    }
}
