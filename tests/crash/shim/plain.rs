//! Test launcher of plain processes of this machine, without namespaces or a root of their own.
//!
//! `slow` in front of a program's name makes the start hang forever, as a hanging mount would.

use std::{
    fs,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::Command,
};

use berth_shim::{
    plan::{ExecPlan, FailureKind, Hooks, LaunchPlan, NamespacePlan, ProcessPlan, ShimFailure, StartTimings},
    worker::launcher::{CreatedNamespaces, ExecTarget, Launcher, PendingStart, PodContext, StartProgress, Stdio},
};

use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use rustix::process::Pid;

/// Starts plain processes.
pub struct Plain;

struct PlainStart {
    report: OwnedFd,
    pid: u32,
    is_slow: bool,
}

impl Launcher for Plain {
    fn make_namespaces(&self, _: &NamespacePlan) -> Result<CreatedNamespaces, ShimFailure> {
        Ok(CreatedNamespaces::default())
    }

    fn begin_launch(
        &self,
        plan: &LaunchPlan,
        _: PodContext<'_>,
        stdio: Stdio,
    ) -> Result<Box<dyn PendingStart>, ShimFailure> {
        start(&plan.process, stdio)
    }

    fn begin_exec(
        &self,
        plan: &ExecPlan,
        inside: ExecTarget<'_>,
        stdio: Stdio,
    ) -> Result<Box<dyn PendingStart>, ShimFailure> {
        assert!(inside.init > 1, "a process to join");
        start(&plan.process, stdio)
    }

    fn begin_poststop(&self, _: &str, _: &Hooks) -> Result<(), ShimFailure> {
        Ok(())
    }
}

impl PendingStart for PlainStart {
    fn report(&self) -> BorrowedFd<'_> {
        self.report.as_fd()
    }

    fn kill(&self) {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw).expect("a number");
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it sleeps");
    }

    fn advance(self: Box<Self>) -> StartProgress {
        if self.is_slow {
            return StartProgress::Pending(self);
        }
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).expect("it is ours to reap");
        let after = stat.rsplit(')').next().expect("a name");
        let start_ticks = after.split_whitespace().nth(19).and_then(|ticks| ticks.parse().ok()).expect("field 22");
        StartProgress::Started { pid: self.pid, start_ticks, terminal: None, took: StartTimings::default() }
    }
}

fn start(process: &ProcessPlan, stdio: Stdio) -> Result<Box<dyn PendingStart>, ShimFailure> {
    let (first, rest) = process.args.split_first().expect("a program");
    let is_slow = first == "slow";
    let (program, arguments) = if is_slow { ("sleep", &["1000".to_owned()][..]) } else { (&**first, rest) };
    let mut command = Command::new(program);
    command.args(arguments).process_group(0);
    let Stdio::Files([stdin, stdout, stderr]) = stdio else {
        let text = "no terminals here".to_owned();
        return Err(ShimFailure { kind: FailureKind::Other, text });
    };
    command.stdin(stdin).stdout(stdout).stderr(stderr);
    // The loop blocks all signals; its children must not inherit that. SIGCHLD stays blocked: one that arrives
    // meanwhile would be lost to the loop.
    let mut kept = SigSet::empty();
    kept.add(Signal::SIGCHLD);
    let blocked = kept.thread_swap_mask(SigmaskHow::SIG_SETMASK).expect("a mask");
    let child = command.spawn();
    blocked.thread_set_mask().expect("a mask");
    let child = child.map_err(|_| ShimFailure {
        kind: FailureKind::Program,
        text: format!("exec: {program:?}: executable file not found in $PATH"),
    })?;
    let (report, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).expect("a pipe");
    if is_slow {
        std::mem::forget(writer); // the pipe stays open: no report arrives
    }
    Ok(Box::new(PlainStart { report, pid: child.id(), is_slow }))
}
