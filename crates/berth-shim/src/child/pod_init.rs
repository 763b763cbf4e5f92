//! Process 1 of a pod with a shared PID namespace: reaps orphans (spec 09a §2.5).
//!
//! It executes the shim's program again, so that it contains nothing of the shim's memory, and then gives up all
//! access: its root is an empty directory, so `/proc/1/root` exposes nothing of the host (AC-09a-X14); no privileges,
//! no descriptors.

use std::{
    ffi::{CStr, CString},
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    process::ExitCode,
};

use nix::{
    libc,
    mount::{MntFlags, umount2},
    sched::{CloneFlags, unshare},
    sys::{
        signal::{SigSet, Signal},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};
use rustix::{
    fs::{Mode, OFlags},
    process::DumpableBehavior,
    thread::set_no_new_privs,
};

use super::{
    container_start::{StartGate, announce},
    error_context::{ErrorContext, Step, failure},
    identity,
    progress_report::Reporter,
};
use crate::plan::{ProcessPlan, StartTimings};
use berth_sys::{
    child_process::{self, NewParent, SingleThreaded},
    mount_api::{self, MountScope},
};

/// Argument of the shim's program that selects this mode.
pub const POD_INIT: &str = "pod-init";
/// Unprivileged user and group id.
const UNPRIVILEGED_ID: u32 = 65_535;

/// Creates process 1; runs in the process that created the namespaces.
pub(super) fn start(alone: SingleThreaded, reporter: &Reporter, program: BorrowedFd<'_>) -> Step<()> {
    let host_proc = super::process_setup::host_proc()?;
    unshare(CloneFlags::CLONE_NEWPID).context(|| "create PID namespace")?;
    let StartGate { wait, release } = StartGate::new()?;
    let mut waiting = Some((wait, release));
    let spawned = child_process::spawn(alone, NewParent::Sibling, None, || {
        let Some((wait, release)) = waiting.take() else { return 127 };
        drop(release);
        let run = || -> Step<()> {
            StartGate::wait(wait)?;
            become_init(alone, reporter, program)
        };
        run().map_or_else(|failure| super::exec_setup::report_failure(reporter, &failure), |()| 0)
    });
    let pid = spawned.context(|| "fork init process of the pod")?;
    announce(reporter, host_proc.as_fd(), pid, StartTimings::default())?;
    let (_, release) = waiting.ok_or_else(|| failure("init process returned in its parent's role"))?;
    StartGate::release(release)
}

/// Executes the program with only the reporter open, so that it can report a failure.
fn become_init(alone: SingleThreaded, reporter: &Reporter, program: BorrowedFd<'_>) -> Step<()> {
    let keep = [reporter.number(), program.as_raw_fd()];
    child_process::close_all_but(alone, &keep).context(|| "close descriptors")?;
    rustix::io::fcntl_setfd(reporter.as_fd(), rustix::io::FdFlags::empty()).context(|| "clear close-on-exec flag")?;
    child_process::reset_signals().context(|| "reset signals")?;
    let number = CString::new(reporter.number().to_string())
        .map_err(std::io::Error::from)
        .context(|| "format descriptor argument")?;
    let name = CString::new(POD_INIT).map_err(std::io::Error::from).context(|| "format program name")?;
    let args: [&CStr; 3] = [c"berth", name.as_c_str(), number.as_c_str()];
    let env: [&CStr; 0] = [];
    let flags = nix::fcntl::AtFlags::AT_EMPTY_PATH;
    match nix::unistd::execveat(program, c"", &args, &env, flags) {
        Err(error) => Err(error).context(|| "execute init process of the pod"),
        Ok(never) => match never {},
    }
}

/// Main function of process 1: called first in `main` if its first argument is [`POD_INIT`], with the argument that
/// follows. Reaps forever; exits with 0 on SIGTERM and SIGINT.
pub fn pod_init(number: &str) -> ExitCode {
    let reporter = number.parse().ok().and_then(|number| child_process::inherited(number).ok()).map(Reporter::from_fd);
    let Some(reporter) = reporter else { return ExitCode::FAILURE };
    let mut signals = SigSet::empty();
    [Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT].into_iter().for_each(|signal| signals.add(signal));
    // Blocked signals reach a process 1 too; others without a handler do not.
    let isolated = signals.thread_block().context(|| "block signals").and_then(|()| isolate());
    if let Err(failure) = isolated {
        reporter.failed(&failure);
        return ExitCode::FAILURE;
    }
    drop(reporter);
    loop {
        match signals.wait() {
            Ok(Signal::SIGTERM | Signal::SIGINT) => return ExitCode::SUCCESS,
            _ => reap(),
        }
    }
}

fn reap() {
    while let Ok(status) = waitpid(Pid::from_raw(-1), Some(WaitPidFlag::WNOHANG)) {
        if status == WaitStatus::StillAlive {
            break;
        }
    }
}

/// Gives up root directory, descriptors, privileges, and user.
fn isolate() -> Step<()> {
    unshare(CloneFlags::CLONE_NEWNS).context(|| "create mount namespace")?;
    mount_api::change_root(libc::MS_SLAVE, MountScope::Tree).context(|| "set mount propagation to slave")?;
    let empty = mount_api::new_mount("tmpfs", "size=0,nr_inodes=1,mode=555", libc::MS_RDONLY)
        .context(|| "mount root filesystem")?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let place = rustix::fs::open("/proc", flags, Mode::empty()).context(|| "open /proc")?;
    mount_api::attach(empty.as_fd(), place.as_fd()).context(|| "attach root filesystem")?;
    rustix::process::fchdir(&empty).context(|| "change to root directory")?;
    rustix::process::pivot_root(".", ".").context(|| "pivot_root")?;
    umount2(".", MntFlags::MNT_DETACH).context(|| "unmount old root")?;
    rustix::process::chdir("/").context(|| "change to root directory")?;
    drop((empty, place));
    for standard in 0..3 {
        // The shim's output is not the pod's; no code of this process uses these descriptors.
        drop(child_process::inherited(standard));
    }
    set_no_new_privs(true).context(|| "set no_new_privs")?;
    let unprivileged = ProcessPlan { uid: UNPRIVILEGED_ID, gid: UNPRIVILEGED_ID, ..ProcessPlan::default() };
    // The user namespace may not map the id: then it stays user 0, without capabilities.
    identity::become_user(&unprivileged, false).or_else(|_| identity::become_user(&ProcessPlan::default(), false))?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable).context(|| "set process not dumpable")
}
