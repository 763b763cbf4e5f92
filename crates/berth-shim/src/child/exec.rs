//! Exec: starts another process in a running container.
//!
//! A joiner enters the container's cgroup and, by the pidfd of its first process, all its namespaces at once; its
//! child, in the PID namespace too, executes the program, with the seccomp filter and privileges that the plan
//! specifies.
//! Implements spec 09a §11, steps 1 to 4.

use std::{
    fs::File,
    io::{self, Read},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::PathBuf,
};

use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, openat, statat},
    process::{Pid, getpid, setsid},
    thread::ThreadNameSpaceType,
};

use super::{
    ProcessLaunch, Stdio,
    container_start::{StartGate, announce, chown_pipes},
    error_context::{ErrorContext, Step, failure},
    exec_setup::{self, ExecSetup, report_failure},
    identity,
    process_setup::{self, CreatedIn},
    progress_report::{self, Reporter},
    terminal,
};
use crate::plan::{ExecPlan, IdMap, StartTimings};
use berth_sys::child_process::{self, NewParent, SingleThreaded};

/// Starts a process in the container whose first process is `init`, a child of the shim that is not reaped yet.
///
/// # Errors
/// If the shim has more than one thread, the container has exited, or no process can be created.
pub fn begin_exec(plan: &ExecPlan, init: u32, groups: &[PathBuf], stdio: Stdio) -> Step<ProcessLaunch> {
    let alone = SingleThreaded::check().context(|| "start process")?;
    let target =
        InitProcess { process: process_setup::process(init)?, proc_directory: process_setup::proc_directory(init)? };
    let (reports, reporter) = progress_report::pair()?;
    let group = process_setup::birth_group(groups)?;
    let parent = getpid();
    let helper = process_setup::spawn_into(alone, group.as_ref().map(AsFd::as_fd), |born| {
        let joiner = Joiner { alone, parent, plan, target: &target, groups, reporter: &reporter };
        joiner.run(stdio, born).map_or_else(|failure| report_failure(&reporter, &failure), |()| 0)
    })?;
    ProcessLaunch::new(reports, helper, None)
}

/// The container's first process by descriptors: its PID may be reused by the time it is joined.
struct InitProcess {
    process: OwnedFd,
    /// Open `/proc/<pid>` directory, for its namespaces, cgroup, and ID map.
    proc_directory: OwnedFd,
}

struct Joiner<'a> {
    alone: SingleThreaded,
    parent: Pid,
    plan: &'a ExecPlan,
    target: &'a InitProcess,
    groups: &'a [PathBuf],
    reporter: &'a Reporter,
}

impl Joiner<'_> {
    fn run(&self, stdio: Stdio, born: CreatedIn) -> Step<()> {
        let process = &self.plan.process;
        let mut keep =
            vec![self.reporter.number(), self.target.process.as_raw_fd(), self.target.proc_directory.as_raw_fd()];
        if let Stdio::Files(files) = &stdio {
            keep.extend(files.iter().map(AsRawFd::as_raw_fd));
        }
        child_process::close_all_but(self.alone, &keep).context(|| "close descriptors")?;
        process_setup::setup_helper(self.parent)?;
        self.enter(born)?;
        process_setup::join_keyring(&self.plan.container);
        process_setup::set_oom_score(process.oom_score_adj);
        identity::raise_limits(process);
        rustix::process::umask(Mode::empty());
        let host_proc = process_setup::host_proc()?;
        let namespaces = self.differing()?;
        let has_users = namespaces.contains(ThreadNameSpaceType::USER);
        let users = if has_users { Some(self.users()?) } else { None };
        chown_pipes(&stdio, process.uid, users);
        rustix::thread::move_into_thread_name_spaces(self.target.process.as_fd(), namespaces)
            .context(|| "join namespaces of the container")?;
        if has_users {
            process_setup::become_root()?;
        }
        self.start(host_proc, stdio)
    }

    /// Enters the container's cgroups, or, if those have child cgroups by now, that of its first process.
    fn enter(&self, born: CreatedIn) -> Step<()> {
        process_setup::enter(self.groups, born).or_else(|failure| {
            let text = self.read_proc_file("cgroup")?;
            let now = text.lines().find_map(|line| line.strip_prefix("0::")).ok_or(failure)?;
            process_setup::enter(&[process_setup::unified_root().join(now.trim_start_matches('/'))], CreatedIn::Outside)
        })
    }

    /// Namespaces of the container that differ from the shim's.
    fn differing(&self) -> Step<ThreadNameSpaceType> {
        let mut differing = ThreadNameSpaceType::empty();
        for (name, ours, kind) in [
            ("user", "user", ThreadNameSpaceType::USER),
            ("mnt", "mnt", ThreadNameSpaceType::MOUNT),
            ("pid", "pid_for_children", ThreadNameSpaceType::PROCESS_ID),
            ("net", "net", ThreadNameSpaceType::NETWORK),
            ("ipc", "ipc", ThreadNameSpaceType::INTER_PROCESS_COMMUNICATION),
            ("uts", "uts", ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME),
            ("cgroup", "cgroup", ThreadNameSpaceType::CONTROL_GROUP),
        ] {
            let identity = |at: BorrowedFd<'_>, path: &str| -> Step<(u64, u64)> {
                let found = statat(at, path, AtFlags::empty()).context(|| format!("stat {path}"))?;
                Ok((found.st_dev, found.st_ino))
            };
            let theirs = identity(self.target.proc_directory.as_fd(), &format!("ns/{name}"))?;
            differing.set(kind, theirs != identity(CWD, &format!("/proc/self/ns/{ours}"))?);
        }
        Ok(differing)
    }

    /// Reads a `/proc` file of the container's first process.
    fn read_proc_file(&self, name: &str) -> Step<String> {
        let opened = openat(&self.target.proc_directory, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        let mut text = String::new();
        let read = opened.map_err(io::Error::from).and_then(|file| File::from(file).read_to_string(&mut text));
        read.map(|_| text).context(|| format!("read {name} of the container's init process"))
    }

    /// Mapping of the container's user ids.
    fn users(&self) -> Step<IdMap> {
        let text = self.read_proc_file("uid_map")?;
        let mut numbers = text.split_ascii_whitespace().map_while(|number| number.parse().ok());
        match (numbers.next(), numbers.next(), numbers.next()) {
            (Some(inside), Some(outside), Some(count)) => Ok(IdMap { inside, outside, count }),
            _ => Err(failure("invalid uid_map of the container's init process")),
        }
    }

    fn start(&self, host_proc: OwnedFd, stdio: Stdio) -> Step<()> {
        let StartGate { wait, release } = StartGate::new()?;
        let mut waiting = Some((stdio, wait, release));
        let spawned = child_process::spawn(self.alone, NewParent::Sibling, None, || {
            let Some((stdio, wait, release)) = waiting.take() else { return 127 };
            drop(release);
            let run = || -> Step<i32> {
                StartGate::wait(wait)?;
                self.become_program(stdio, &host_proc)
            };
            run().unwrap_or_else(|failure| report_failure(self.reporter, &failure))
        });
        let pid = spawned.context(|| "fork process")?;
        announce(self.reporter, host_proc.as_fd(), pid, StartTimings::default())?;
        let (_, _, release) = waiting.ok_or_else(|| failure("forked process returned in its parent's role"))?;
        StartGate::release(release)
    }

    /// Sets up the process and executes the program. Returns only on failure.
    fn become_program(&self, stdio: Stdio, host_proc: &OwnedFd) -> Step<i32> {
        let process = &self.plan.process;
        setsid().context(|| "create session")?;
        if self.plan.keeps_orphans {
            nix::sys::prctl::set_child_subreaper(true).context(|| "set child subreaper")?;
        }
        let profile = exec_setup::open_profile(process, host_proc.as_fd())?;
        let slave = match stdio {
            Stdio::Files(_) => None,
            Stdio::Terminal => {
                let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let root = rustix::fs::openat(CWD, "/", flags, Mode::empty()).context(|| "open root directory")?;
                let made = terminal::make(root.as_fd(), process.terminal.unwrap_or_default(), process.uid)?;
                self.reporter.terminal(made.master.as_fd())?;
                Some(made.slave)
            }
        };
        exec_setup::take_stdio(stdio, slave)?;
        Ok(exec_setup::execute(
            self.alone,
            ExecSetup { process, reporter: self.reporter, profile, hooks: None, line: None },
        ))
    }
}
