//! A start in progress, as the shim's event loop drives it.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::process::{Signal, pidfd_send_signal};

use super::{
    error_context::{Step, failure},
    process_setup,
    progress_report::{Message, Reports},
};
use crate::plan::{ShimFailure, StartTimings};

/// A process being started. Poll its descriptor for input; then call [`ProcessLaunch::advance`].
#[derive(Debug)]
pub struct ProcessLaunch {
    reports: Reports,
    helper: OwnedFd,
    /// Process that runs hooks on the host.
    runner: Option<OwnedFd>,
    process: Option<ProgramProcess>,
    terminal: Option<OwnedFd>,
    executes: bool,
    failed: Option<ShimFailure>,
}

/// The process that will execute the program.
#[derive(Debug)]
struct ProgramProcess {
    pid: u32,
    ticks: u64,
    took: StartTimings,
    /// Pidfd; `None` if the process exited, and was reaped, before its report was read.
    fd: Option<OwnedFd>,
}

/// State of a start in progress.
#[derive(Debug)]
pub enum LaunchProgress {
    /// Not finished.
    Pending(ProcessLaunch),
    /// The program runs, or has run.
    Started {
        /// PID of its process, a child of the shim.
        pid: u32,
        /// Start time (field 22 of `/proc/<pid>/stat`).
        start_ticks: u64,
        /// Descriptor of the pty master, if it has a terminal.
        terminal: Option<OwnedFd>,
        /// Durations of the steps of the start.
        took: StartTimings,
    },
    /// No program was executed. The processes of the start exit by themselves and must be reaped.
    Failed(ShimFailure),
}

impl AsFd for ProcessLaunch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.reports.as_fd()
    }
}

impl ProcessLaunch {
    pub(super) fn new(reports: Reports, helper: u32, runner: Option<u32>) -> Step<Self> {
        let (helper, runner) = (process_setup::process(helper)?, runner.map(process_setup::process).transpose()?);
        Ok(Self { reports, helper, runner, process: None, terminal: None, executes: false, failed: None })
    }

    /// Processes pending reports. Never blocks.
    pub fn advance(mut self) -> LaunchProgress {
        loop {
            match self.reports.next() {
                Ok(Some(message)) => self.handle_report(message),
                Ok(None) => return self.conclude(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return LaunchProgress::Pending(self),
                Err(error) => {
                    self.kill();
                    return LaunchProgress::Failed(failure(format!("read report of child process: {error}")));
                }
            }
        }
    }

    /// Kills the processes of the start: its deadline passed. [`LaunchProgress::Failed`] follows once they have exited.
    pub fn kill(&self) {
        let process = self.process.as_ref().and_then(|process| process.fd.as_ref());
        for child in [Some(&self.helper), process, self.runner.as_ref()].into_iter().flatten() {
            let _has_ended = pidfd_send_signal(child, Signal::KILL);
        }
    }

    /// PID of the container's process, once it exists; its program may not run yet.
    pub fn process(&self) -> Option<u32> {
        self.process.as_ref().map(|process| process.pid)
    }

    fn handle_report(&mut self, message: Message) {
        match message {
            Message::Process { pid, ticks, took } => {
                self.process = Some(ProgramProcess { pid, ticks, took, fd: process_setup::process(pid).ok() });
            }
            Message::Terminal(master) => self.terminal = Some(master),
            Message::Executes => self.executes = true,
            Message::Failed(failure) => self.failed = self.failed.take().or(Some(failure)),
            Message::Namespace(..) | Message::Unmapped => {}
        }
    }

    fn conclude(self) -> LaunchProgress {
        match (self.failed, self.process) {
            (Some(failure), _) => LaunchProgress::Failed(failure),
            (None, Some(ProgramProcess { pid, ticks, took, .. })) if self.executes => {
                LaunchProgress::Started { pid, start_ticks: ticks, terminal: self.terminal, took }
            }
            (None, Some(_)) => LaunchProgress::Failed(failure("process was killed before its program was executed")),
            (None, None) => {
                LaunchProgress::Failed(failure("helper process was killed before the container process started"))
            }
        }
    }
}
