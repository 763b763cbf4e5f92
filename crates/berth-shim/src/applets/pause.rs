//! Applet `pause`: keeps a pod's namespaces alive, reaps orphans, and exits on a signal.

use std::process;

use nix::{
    sys::{
        signal::{SigSet, Signal},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};

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
